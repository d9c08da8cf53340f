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


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
def test_one_bad_element_is_found_among_extreme_finite_ones(dtype):
    @jax.jit
    def check(x):
        tree = {"a": np.ones(7, dtype), "b": [x]}
        return ls.all_finite(tree), ls.max_magnitude(tree), is_nonfinite(x)

    info = jnp.finfo(dtype)
    extremes = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0]
    good = np.resize(np.array(extremes, dtype), (3, 17))
    with enable_x64(True):
        finite, largest, bad = check(good)
        assert finite and not bad.any()
        assert (largest.shape, largest.dtype) == ((), jnp.float32)
        assert float(largest) == min(float(info.max), LARGEST)
        elements = BAD_COMPLEX if "complex" in dtype else BAD
        for place, element in itertools.product(((0, 0), (1, 8), (2, 16)), elements):
            x = good.copy()
            # Some types of 8 bits have no infinity, and hold a NaN instead.
            x[place] = element
            finite, largest, bad = check(x)
            assert not finite and not np.isfinite(largest), (place, element)
            np.testing.assert_array_equal(bad, ~np.isfinite(x))


MANY = np.ones(10_000, np.float32)
NAN, ONE_INF = MANY.copy(), MANY.copy()
NAN[77], ONE_INF[77] = np.nan, -np.inf
BEYOND = np.complex64([1, 3e38 + 3e38j])
KEY, FLOAT0 = jax.random.wrap_key_data(np.zeros(2, np.uint32)), jax.dtypes.float0
# Leaves that cannot hold a NaN, and a number.
OTHERS = [np.int32(100), np.bool_(True), np.ones(2, jnp.int4), np.zeros(2, FLOAT0), KEY]
OTHERS += [None, optax.MaskedNode(), np.zeros((0, 3)), 1, jax.nn.relu, "relu", -0.5]
MAGNITUDES = {
    **{f"{empty}": (empty, 0.0) for empty in ({}, None, [], optax.MaskedNode())},
    "others": (OTHERS, 0.5),
    "others, NaN": ([*OTHERS, float("nan")], np.nan),
    "others, inf": ([*OTHERS, np.float32(np.inf)], np.inf),
    # XLA on CPU drops a NaN from a maximum of floats.
    "NaN after inf": ([MANY * np.inf, NAN], np.nan),
    "-NaN": ([MANY, -NAN], np.nan),
    "all NaN": ([MANY, MANY * np.nan], np.nan),
    "-inf": ([MANY, ONE_INF], np.inf),
    "complex": (np.complex64([1, 3 + 4j]), 5.0),
    # A finite number beyond float32 is the largest one.
    "complex beyond float32": (BEYOND, LARGEST),
    "complex inf": (np.complex64([np.inf, BEYOND[1]]), np.inf),
    "float64 beyond float32": (np.array([1.0, -1e300]), LARGEST),
    "float64 inf": (np.array([1.0, -np.inf]), np.inf),
}


@pytest.mark.parametrize("row", MAGNITUDES)
def test_largest_magnitude_is_finite_if_all_elements_are(row):
    tree, expected = MAGNITUDES[row]
    with enable_x64(True):
        np.testing.assert_equal(float(ls.max_magnitude(tree)), expected)
        assert ls.all_finite(tree) == np.isfinite(expected)


@pytest.mark.parametrize(
    ("names", "finite"), [("j", [True, False]), (("i", "j"), [False, False])]
)
def test_members_along_named_axes_get_the_same_answer(names, finite):
    def checks(x):
        magnitude = ls.max_magnitude(x, axis_name=names)
        return ls.all_finite(x, axis_name=names), jnp.isfinite(magnitude)

    mapped = jax.vmap(jax.vmap(checks, axis_name="j"), axis_name="i")
    expected = np.repeat(finite, 3).reshape(2, 3)
    for found in jax.jit(mapped)(np.float32([[1, 1, 1], [1, 1, np.inf]])):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["data", 0, ("i", "data"), ("i", 0), ["i"], ("i", {})])
@pytest.mark.parametrize("check", [ls.all_finite, ls.max_magnitude])
def test_check_refuses_an_unbound_axis_name(check, name):
    message = f"`axis_name` must name an axis .* got {re.escape(repr(name))}"
    mapped = jax.vmap(lambda x: check(x, axis_name=name), axis_name="i")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, np.ones(2))


def test_check_is_a_constant_to_derivatives():
    gradient = jax.jit(jax.grad(lambda x: jnp.where(ls.all_finite(x), x, 0.0) ** 2))
    assert float(gradient(3.0)) == 6.0


@pytest.mark.parametrize("honored", [True, False])
def test_no_flag_of_the_compiler_hides_a_nan(honored, monkeypatch):
    """With such flags XLA takes x - x for 0, or comparisons with NaN for False."""
    good = jnp.ones(100)  # XLA reads its variable before the first program, once
    flags = {f"xla_cpu_fast_math_honor_{x}": honored for x in ("nans", "infs")}
    flags["xla_cpu_enable_fast_math"] = True
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    tx = ls.with_loss_scaling(optax.sgd(0.1), ls.FixedLossScale(1.0))
    check = jax.jit(ls.all_finite, compiler_options=flags)
    update = jax.jit(tx.update, compiler_options=flags)
    assert check([good, good])
    for dtype, bad in itertools.product(FLOATS[:4], BAD):
        assert not check([good, np.array([1, bad] * 50, dtype)]), (dtype, bad)
        updates, _ = update(x := np.float32([1, bad]), tx.init(x))
        assert_no_update(updates)
