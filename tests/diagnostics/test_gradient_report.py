"""gradient_report, and what it and suggest_loss_scale refuse."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import vary
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh
from report_oracle import host, oracle
from shared import enable_x64

import optax_lossscale as ls

LARGEST = np.finfo(np.float32).max


def counts(report, leaf=0):
    return {name: float(field[leaf]) for name, field in report._asdict().items()}


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
            report = ls.gradient_report([grads], loss_scale=scale, dtype=dtype)
        assert counts(report) == oracle(grads, scale, dtype), x


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
        return ls.gradient_report([jnp.where(index % 7 == 0, x, y)])

    # Optimized, the program never writes the array out.
    options = {"xla_backend_optimization_level": 3}
    report = jax.jit(report, compiler_options=options)

    found = counts(report(np.nan, 1e-9))
    *rows, length = shape
    nan, size = math.prod(rows) * -(-length // 7), math.prod(shape)
    for name, number in {"nan": nan, "underflow": size - nan, "size": size}.items():
        assert found[name] == pytest.approx(number, rel=1e-6 * (number > 2**24)), name


def test_sums_over_leaves_are_within_1e_6():
    numbers = [40_000_019.0, *[7.0] * 100]
    totals = ls.GradientReport(*[numbers] * 8).totals
    assert float(totals.size) == pytest.approx(sum(numbers), rel=1e-6)
    assert {*map(float, ls.gradient_report({}).totals)} == {0.0}


def test_an_ensemble_has_a_report_for_each_member():
    members = np.float32([[1.0, 2.0, 3.0], [np.nan, 0.0, 5.0]])
    report = jax.jit(jax.vmap(lambda g: ls.gradient_report([g, g[:1]])))(members)
    assert report.nan[0].tolist() == [0, 1]
    assert report.totals.max_abs.tolist() == [3.0, 5.0]
    assert report.totals.nan.tolist() == [0, 2]


GLOBAL = np.ones((16, 8), np.float32)
GLOBAL[3, 3], GLOBAL[11], GLOBAL[15, 7] = np.nan, 1e-9, 9.0
suggest = jax.jit(ls.suggest_loss_scale)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_a_report_on_sharded_arrays_is_the_same(axis_type):
    mesh = make_mesh(axis_type, a=4, b=2)
    sharded = jax.device_put([GLOBAL], NamedSharding(mesh, P("a", "b")))
    for function in (ls.gradient_report, suggest):
        assert host(function(sharded)) == host(function([GLOBAL]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_report_under_shard_map_sums_along_the_named_axis(check_vma):
    def report(x, bias):
        # The bias has a gradient on every device.
        grads = {"w": x, "b": vary(bias, "d")}
        alone = ls.gradient_report(grads).nan["w"][None]
        return ls.gradient_report(grads, axis_name="d"), alone

    specs = (P("d"), P()), (P(), P("d"))
    per_device = on_mesh(report, *specs, check_vma=check_vma)
    summed, alone = per_device(GLOBAL, np.ones(3, np.float32))
    expected = ls.gradient_report({"w": GLOBAL, "b": np.ones(8 * 3)})
    assert host(summed) == host(expected)
    assert alone.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_more_arrays_of_the_same_shapes_compile_nothing_more(caplog):
    """XLA compiles one program of many arrays in quadratic time."""
    grads = {"w": np.ones((7, 3)), "b": np.ones(3)}
    ls.gradient_report([grads])
    with jax.log_compiles():
        ls.gradient_report([grads] * 50)
    assert not [x for x in caplog.messages if x.startswith("Compiling")]


def test_nothing_waits_for_the_device():
    grads = {"w": jnp.asarray(np.ones(3))}
    with jax.transfer_guard_device_to_host("disallow"):
        ls.gradient_report(grads, loss_scale=jnp.float32(8.0)).totals  # noqa: B018
        ls.suggest_loss_scale(grads)


REFUSED = [
    ("grads", {"a": np.arange(3)}, "must hold floating-point gradients, got {'a'"),
    ("grads", {"a": [1.0, "b"]}, r"must hold only arrays, got 'b' at \['a'\]\[1\]"),
    *(("dtype", x, "must be a floating-point type") for x in ("int8", "float17", None)),
]


@pytest.mark.parametrize("function", [ls.gradient_report, ls.suggest_loss_scale])
@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_cannot_be_measured_is_refused(function, name, value, message):
    with pytest.raises(ValueError, match=message):
        function(**{"grads": [np.ones(2)], name: value})


def test_what_is_no_scale_or_no_axis_is_refused():
    for scale in (0, math.inf, True, np.ones(2), np.array(True)):
        with pytest.raises(ValueError, match="`loss_scale` must be a number from 2"):
            ls.gradient_report([np.ones(2)], loss_scale=scale)
    with pytest.raises(ValueError, match="`axis_name` must name an axis"):
        ls.gradient_report([np.ones(2)], axis_name="data")
