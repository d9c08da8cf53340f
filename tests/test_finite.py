"""all_finite and max_magnitude."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update
from shared import enable_x64

import optax_lossscale as ls
from optax_lossscale._finite import is_nonfinite

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
