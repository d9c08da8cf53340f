"""gradient_report, beside NumPy and ml_dtypes; and where all diagnostics run."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh
from report_oracle import host, oracle
from shared import enable_x64

import optax_lossscale as ls

LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(("wide", "scale"), [(np.float32, 8.0), (np.float64, 1.0)])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float32"]
)
def test_elements_at_the_limits_are_counted_as_rounding_has_it(dtype, wide, scale):
    info = jnp.finfo(dtype)
    least, tiny, largest = map(float, (info.smallest_subnormal, info.tiny, info.max))
    # The ties to zero, to the least normal number and to what lies beyond the largest.
    tie = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    limits = np.array([least / 2, least, tiny - least / 2, tiny, largest, tie])
    # XLA on CPU takes smaller ones for zero.
    limits = np.float32(limits[(limits > 2.0**-126) & (limits < LARGEST)])
    around = [np.nextafter(limits, np.float32(0)), np.nextafter(limits, LARGEST)]
    for x in np.concatenate([limits, *around, np.float32([0, np.nan, np.inf])]):
        with enable_x64(wide is np.float64):
            grads = np.array([x, -x], wide) / wide(scale)
            report = host(ls.gradient_report(grads, loss_scale=scale, dtype=dtype))
        assert report._asdict() == oracle(grads, scale, dtype), x


COMPLEX = [3 + 4j, 1e-9 + 1e-9j, complex(3e38, -3e38), 7e4j, 0j, np.nan]
COMPLEX += [complex(np.inf, 0), complex(1, -np.inf), complex(np.inf, np.nan)]
LEAVES = {
    "w": np.float32([[1e-9, 1.0], [np.nan, -np.inf]]),
    "half": np.float16([3e-8, 2.0]),
    "number": 0.5,
    "float64": np.array([1e-300, 1, 1e300]),
    "complex64": np.array(COMPLEX, np.complex64),
    "complex128": np.array(COMPLEX),
    "empty": np.zeros((0, 3)),
}
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
UNCOUNTED = {"count": np.arange(3), "key": KEY}
UNCOUNTED["float0"] = np.zeros(2, jax.dtypes.float0)


def test_each_leaf_has_its_counts_compiled_or_not():
    grads = {**LEAVES, **UNCOUNTED, "none": None}
    with enable_x64(True):
        report = ls.gradient_report(grads)
        compiled = jax.jit(lambda g, s: ls.gradient_report(g, loss_scale=s))(grads, 1.0)
        totals = host(report.totals)
    assert host(compiled) == host(report)
    leaves = jax.tree.leaves((report, compiled))
    types = {(x.shape, x.dtype.name, x.weak_type) for x in leaves}
    assert types == {((), "float32", False)}
    expected = {name: oracle(leaf, 1.0, "float16") for name, leaf in LEAVES.items()}
    expected |= {name: oracle([], 1.0, "float16") for name in UNCOUNTED}
    for field, values in host(report)._asdict().items():
        assert values.pop("none") is None
        assert values == {name: counts[field] for name, counts in expected.items()}
        combine = max if field == "max_abs" else sum
        assert getattr(totals, field) == combine(values.values()), field


@pytest.mark.parametrize("shape", [(3, 2**22 + 1), (2**16 + 1, 2**15 + 3)])
def test_counts_are_exact_to_2_to_the_24_and_within_1e_6_beyond(shape):
    def report(x, y):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
        return ls.gradient_report(jnp.where(index % 7 == 0, x, y))

    # Optimized, the program never writes the array out.
    options = {"xla_backend_optimization_level": 3}
    report = jax.jit(report, compiler_options=options)
    found = host(report(np.nan, 1e-9))._asdict()
    *rows, length = shape
    nan, size = math.prod(rows) * -(-length // 7), math.prod(shape)
    for name, number in {"nan": nan, "underflow": size - nan, "size": size}.items():
        assert found[name] == pytest.approx(number, rel=1e-6 * (number > 2**24)), name


def test_sums_over_leaves_are_within_1e_6():
    numbers = [40_000_019.0, *[7.0] * 100]
    totals = ls.GradientReport(*[numbers] * 8).totals
    assert float(totals.size) == pytest.approx(sum(numbers), rel=1e-6)
    assert {*map(float, ls.gradient_report({}).totals)} == {0.0}


GLOBAL = np.ones((16, 8), np.float32)
GLOBAL[3, 3], GLOBAL[11], GLOBAL[15, 7] = np.nan, 1e-9, 9.0
suggest = jax.jit(ls.suggest_loss_scale)


def test_report_sums_along_the_named_axis():
    def summed(x, bias):
        return ls.gradient_report({"w": x, "b": bias}, axis_name="d")

    bias = np.ones((8, 3), np.float32)
    expected = host(ls.gradient_report({"w": GLOBAL, "b": bias}))
    for check_vma in (True, False):
        per_device = on_mesh(summed, (P("d"), P("d")), P(), check_vma=check_vma)
        assert host(per_device(GLOBAL, bias)) == expected
    of_members = jax.vmap(summed, out_axes=None, axis_name="d")
    assert host(of_members(GLOBAL.reshape(8, 2, 8), bias)) == expected


def test_report_without_an_axis_is_of_each_device_or_member():
    def nan(x):
        return ls.gradient_report([x, x[:1]]).totals.nan[None]

    expected = [0, 1, 0, 0, 0, 0, 0, 0]
    assert on_mesh(nan, P("d"), P("d"))(GLOBAL).tolist() == expected
    assert jax.vmap(nan)(GLOBAL.reshape(8, 2, 8)).ravel().tolist() == expected


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_sharded_arrays_are_measured_as_whole_ones(axis_type):
    mesh = make_mesh(axis_type, a=4, b=2)
    sharded = jax.device_put([GLOBAL], NamedSharding(mesh, P("a", "b")))
    for function in (ls.gradient_report, suggest):
        assert host(function(sharded)) == host(function([GLOBAL]))


def test_nothing_waits_for_the_device_or_compiles_for_each_array(caplog):
    """XLA compiles one program of many arrays in quadratic time."""
    grads = {"w": jnp.asarray(np.ones((7, 3))), "b": jnp.asarray(np.ones(3))}
    scale = jnp.float32(8.0)
    with jax.transfer_guard_device_to_host("disallow"):
        ls.gradient_report(grads, loss_scale=scale).totals  # noqa: B018
        ls.suggest_loss_scale(grads)
        with jax.log_compiles():
            ls.gradient_report([grads] * 50, loss_scale=scale)
    assert not [x for x in caplog.messages if x.startswith("Compiling")]


def test_diagnostics_are_constants_to_derivatives():
    state, errors = ls.FixedLossScale().init(), []
    state = state._replace(consecutive_skips=jnp.int32(7))

    def grads_at(x):
        return {"w": x * jnp.array([1.0, 2.0]), "complex": jax.lax.complex(x, x)}

    def loss(x):
        options = {"max_consecutive_skips": 4, "on_error": errors.append, "value": x}
        stopped = state._replace(loss_scale=x * state.loss_scale)
        ls.check_loss_scale(stopped, grads=grads_at(x), **options)
        report = ls.gradient_report(grads_at(x), loss_scale=x)
        suggested = ls.suggest_loss_scale(grads_at(x))
        constants = report.max_abs["w"] * suggested.loss_scale * suggested.rescued
        return (1 + constants) * x**2

    x = jnp.float32(2.0**-26)
    second_derivative = jax.jit(jax.hessian(jax.checkpoint(loss)))
    assert float(second_derivative(x)) == 2 * (1 + 2.0**-25 * 2.0**24)
    jax.effects_barrier()
    report = ls.gradient_report(grads_at(x), loss_scale=x * state.loss_scale)
    assert str(errors[0]).startswith("The last 7 steps were")
    assert str(errors[0]).endswith(f"The last gradients:\n{ls.format_report(report)}")
