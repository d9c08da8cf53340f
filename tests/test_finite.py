"""all_finite and max_magnitude."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update
from jax import export
from jax.sharding import PartitionSpec as P
from meshes import on_mesh
from shared import enable_x64

import optax_lossscale as ls
from optax_lossscale._finite import _all_finite, is_nonfinite

FLOATS = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn", "float64"]
FLOATS += ["float8_e5m2fnuz"]  # its only NaN has the bits of -0.0 in other types
BAD = [np.nan, np.inf, -np.inf]
BAD_COMPLEX = [*BAD, *(complex(x, y) for x, y in itertools.product((0, *BAD), BAD))]
LARGEST = float(np.finfo(np.float32).max)
of_each_type = pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])


@jax.jit
def check(x):
    tree = {"a": np.ones(7, x.dtype), "b": [x]}
    return ls.all_finite(tree), ls.max_magnitude(tree), is_nonfinite(x)


def extremes(dtype):
    info = jnp.finfo(dtype)
    numbers = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0]
    return np.resize(np.array(numbers, dtype), (3, 17))


@of_each_type
def test_max_magnitude_of_extremes_is_a_float32_and_clipped(dtype):
    with enable_x64(True):
        _, largest, _ = check(extremes(dtype))
    assert (largest.shape, largest.dtype) == ((), jnp.float32)
    assert float(largest) == min(float(jnp.finfo(dtype).max), LARGEST)


@of_each_type
def test_one_bad_element_is_found_among_extreme_finite_ones(dtype):
    good = extremes(dtype)
    with enable_x64(True):
        finite, _, bad = check(good)
        assert finite and not bad.any()
        elements = BAD_COMPLEX if "complex" in dtype else BAD
        for place, element in itertools.product(((0, 0), (1, 8), (2, 16)), elements):
            x = good.copy()
            # Some types of 8 bits have no infinity, and hold a NaN instead.
            x[place] = element
            finite, largest, bad = check(x)
            assert not finite and not np.isfinite(largest), (place, element)
            np.testing.assert_array_equal(bad, ~np.isfinite(x))


MANY = np.ones(10_000, np.float32)
NAN = MANY.copy()
NAN[77] = np.nan
BEYOND = np.complex64([1, 3e38 + 3e38j])
KEY, FLOAT0 = jax.random.wrap_key_data(np.zeros(2, np.uint32)), jax.dtypes.float0
# Leaves that cannot hold a NaN.
OTHERS = [np.int32(100), np.bool_(True), np.ones(2, jnp.int4), np.zeros(2, FLOAT0), KEY]
OTHERS += [None, optax.MaskedNode(), np.zeros((0, 3)), 1, jax.nn.relu, "relu"]
MAGNITUDES = {
    **{f"{empty}": (empty, 0.0) for empty in ({}, None, [], optax.MaskedNode())},
    # XLA on CPU drops a NaN from a maximum of floats.
    "NaN after inf": ([MANY * np.inf, NAN], np.nan),
    "-NaN": ([MANY, -NAN], np.nan),
    "all NaN": ([MANY, MANY * np.nan], np.nan),
    "complex": (np.complex64([1, 3 + 4j]), 5.0),
    # A finite number beyond float32 is the largest one.
    "complex beyond float32": (BEYOND, LARGEST),
    "complex inf": (np.complex64([np.inf, BEYOND[1]]), np.inf),
    "float64 inf": (np.array([1.0, -np.inf]), np.inf),
}


@pytest.mark.parametrize(("tree", "expected"), MAGNITUDES.values(), ids=MAGNITUDES)
def test_max_magnitude_of_a_tree(tree, expected):
    """It is finite if `all_finite` says so."""
    with enable_x64(True):
        np.testing.assert_equal(float(ls.max_magnitude(tree)), expected)
        assert ls.all_finite(tree) == np.isfinite(expected)


@pytest.mark.parametrize("number", [0.5, np.nan, np.inf])
def test_leaves_that_cannot_hold_nan_are_ignored(number):
    tree = [*OTHERS, -number]
    np.testing.assert_equal(float(ls.max_magnitude(tree)), number)
    assert ls.all_finite(tree) == np.isfinite(number)


@pytest.mark.parametrize(
    ("names", "finite"), [("j", [True, False]), (("i", "j"), [False, False])]
)
def test_members_along_named_axes_get_the_same_answer(names, finite):
    def checks(x):
        magnitude = ls.max_magnitude(x, axis_name=names)
        return ls.all_finite(x, axis_name=names), jnp.isfinite(magnitude)

    mapped = jax.jit(jax.vmap(jax.vmap(checks, axis_name="j"), axis_name="i"))
    expected, members = np.repeat(finite, 3).reshape(2, 3), np.stack([[MANY] * 3] * 2)
    for bad in (np.inf, np.nan):
        members[1, 2, 77] = bad
        for found in mapped(members):
            np.testing.assert_array_equal(found, expected)


NO_NAMES = ["data", 0, ("i", "data"), ("i", 0), ["i"], ("i", {})]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
@pytest.mark.parametrize("check", [ls.all_finite, ls.max_magnitude])
def test_check_refuses_what_names_no_axis(check, name):
    message = f"`axis_name` must name an axis .* got {re.escape(repr(name))}"
    mapped = jax.vmap(lambda x: check(x, axis_name=name), axis_name="i")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, np.ones(2))


FAST = {"xla_cpu_enable_fast_math": True, "xla_backend_optimization_level": 3}
# XLA takes x - x for 0, or comparisons with NaN for False.
fast_math = pytest.mark.parametrize(
    "options",
    [
        {**FAST, **{f"xla_cpu_fast_math_honor_{x}": honored for x in ("nans", "infs")}}
        for honored in (True, False)
    ],
    ids=["NaN honored", "NaN not honored"],
)


# float64 and the other types of 8 bits are converted to float32, too.
@fast_math
@pytest.mark.parametrize("dtype", FLOATS[:4])
def test_fast_math_hides_no_nan_and_finds_none_where_none_is(options, dtype):
    check = jax.jit(ls.all_finite, compiler_options=options)
    limits = jnp.finfo(dtype)
    for number in (1, limits.max, -limits.max, limits.tiny, limits.smallest_subnormal):
        assert check(np.array([0, number] * 50, dtype)), number
    for bad in BAD:
        assert not check(np.array([1, bad] * 50, dtype)), bad


@fast_math
def test_fast_math_lets_no_bad_update_pass(options):
    tx = ls.with_loss_scaling(optax.sgd(0.1), ls.FixedLossScale(1.0))
    update = jax.jit(tx.update, compiler_options=options)
    for bad in BAD:
        grads = np.float32([1, bad])
        updates, _ = update(grads, tx.init(grads))
        assert_no_update(updates)
    assert np.all(update(np.ones(2, np.float32), tx.init(grads))[0])


@pytest.fixture
def one_device(monkeypatch):
    """As where one CPU is the only one: the rows of large arrays are summed up."""
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    _all_finite.clear_cache()
    yield
    _all_finite.clear_cache()


LARGE = {
    "matrix": (512, 256),
    "few factors of two": (333, 777),
    "vector": (2**17,),
    "prime": (2**17 + 29,),
    "kernel": (3, 3, 128, 128),
}


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize(
    "options", [{}, *fast_math.args[1]], ids=["", "fast", "fastest"]
)
def test_one_bad_element_of_a_large_array_is_found(one_device, shape, options):
    check = jax.jit(ls.all_finite, compiler_options=options)
    for number in (1, LARGEST, -LARGEST):
        assert check(np.resize(np.float32([0, number]), shape)), number
    x = np.ones(shape, np.float32)
    for place, bad in itertools.product((0, x.size // 3, -1), BAD):
        x.flat[place] = bad
        assert not check(x), (place, bad)
        x.flat[place] = 1
    x.flat[0], x.flat[-1] = np.inf, -np.inf
    assert not check(x)


def products(fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count("dot_general[")


def test_only_large_arrays_of_one_device_are_summed_up_by_rows(one_device):
    large, small = jnp.ones(LARGE["matrix"]), jnp.ones((64, 64))
    assert products(ls.all_finite, small) == 1 < products(ls.all_finite, large)
    across = on_mesh(lambda x: ls.all_finite(x, axis_name="d"), P("d"), P())
    assert products(across, large) == 1 and across(large)


def test_large_arrays_are_checked_by_vmap_in_host_memory_and_at_open_sizes(one_device):
    members = np.ones((3, *LARGE["matrix"]), np.float32)
    members[1, 7, 9] = np.nan
    np.testing.assert_array_equal(jax.vmap(ls.all_finite)(members), [True, False, True])
    if hasattr(jax, "memory"):
        far = jax.device_put(members, jax.memory.Space.Host)
        assert not jax.jit(ls.all_finite)(far)
    [rows] = export.symbolic_shape("rows")
    like = jax.ShapeDtypeStruct((rows, 256), np.float32)
    program = export.export(jax.jit(ls.all_finite), platforms=("cpu", "tpu"))(like)
    assert program.call(members[0]) and not program.call(members[1])


def test_report_leaves_out_the_matmul_of_a_check(one_device):
    assert ls.autocast_report(ls.all_finite, jnp.ones(LARGE["matrix"])) == ()
