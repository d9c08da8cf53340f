"""all_finite and max_magnitude."""

import ast
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import WARNINGS_ARE_ERRORS, worker_environment
from shared import enable_x64

import optax_lossscale as ls
from optax_lossscale._finite import is_nonfinite

FLOATS = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]
BAD = [np.nan, np.inf, -np.inf]
LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "float64", "complex128"])
def test_one_bad_element_is_found_among_extreme_finite_ones(dtype):
    with enable_x64(True):
        info, check = jnp.finfo(dtype), jax.jit(ls.all_finite)
        extremes = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0]
        good = np.resize(np.array(extremes, jnp.dtype(dtype)), (3, 17))
        assert check({"a": good, "b": [good]}) and ls.all_finite(good)
        largest = ls.max_magnitude({"a": np.ones(7, good.dtype), "b": [good]})
        assert (largest.shape, largest.dtype) == ((), jnp.float32)
        assert float(largest) == min(float(info.max), LARGEST)
        # float8_e4m3fn has no infinity: it holds a NaN instead
        both = [complex(x, y) for x, y in itertools.product((0, *BAD), BAD)]
        bad = [*BAD, *both] if "complex" in dtype else BAD
        for place, element in itertools.product(((0, 0), (1, 8), (2, 16)), bad):
            x = good.copy()
            x[place] = element
            assert not check({"a": good, "b": [x]}), (place, element)
        assert not ls.all_finite(x)


# Leaves that cannot hold a NaN, and a number.
OTHERS = {
    **{"int": jnp.int32(100), "bool": jnp.bool_(True), "int4": jnp.ones(2, jnp.int4)},
    **{"float0": np.zeros(2, jax.dtypes.float0), "key": jax.random.key(0)},
    **{"none": None, "masked": optax.MaskedNode(), "empty": jnp.zeros((0, 3))},
    **{"python": 1, "function": jax.nn.relu, "string": "relu", "number": -0.5},
}


def test_leaves_that_cannot_hold_a_nan_are_finite_and_have_no_magnitude():
    assert ls.all_finite(OTHERS) and float(ls.max_magnitude(OTHERS)) == 0.5
    assert not ls.all_finite({**OTHERS, "python": float("nan")})
    assert not ls.all_finite({**OTHERS, "numpy": np.float32(np.inf)})
    for empty in ({}, None, [], optax.MaskedNode()):
        assert ls.all_finite(empty) and jax.jit(ls.all_finite)(empty)
        assert float(ls.max_magnitude(empty)) == 0.0


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "float64", "complex128"])
def test_bits_tell_what_is_not_finite(dtype):
    with enable_x64(True):
        info = jnp.finfo(dtype)
        finite = [0.0, float(info.max), float(info.min), float(info.tiny)]
        x = jnp.asarray([*finite, jnp.nan, jnp.inf, -jnp.inf]).astype(dtype)
        expected = ~np.isfinite(np.asarray(x))
        np.testing.assert_array_equal(jax.jit(is_nonfinite)(x), expected)


@pytest.mark.parametrize("jit", [True, False])
def test_one_nan_among_many_elements_is_the_largest_magnitude(jit):
    """XLA on CPU drops it from a maximum of floats."""
    measure = jax.jit(ls.max_magnitude) if jit else ls.max_magnitude
    for value in (jnp.nan, -jnp.nan):
        x = jnp.ones(10_000).at[77].set(value)
        assert jnp.isnan(measure([jnp.full(3, jnp.inf), x]))
        assert jnp.isnan(measure(jnp.full(10_000, value)))
    assert measure([jnp.ones(10_000).at[77].set(-jnp.inf)]) == jnp.inf


def test_a_finite_magnitude_beyond_float32_is_the_largest_float32():
    assert float(ls.max_magnitude(jnp.array([3 + 4j], jnp.complex64))) == 5.0
    beyond = jnp.array([1, 3e38 + 3e38j], jnp.complex64)
    assert float(ls.max_magnitude(beyond)) == LARGEST and ls.all_finite(beyond)
    assert float(ls.max_magnitude(beyond.at[0].set(np.inf))) == np.inf
    with enable_x64(True):
        assert float(ls.max_magnitude(jnp.array(-1e300))) == LARGEST
        assert float(ls.max_magnitude(jnp.array([1.0, -np.inf]))) == np.inf


def test_along_named_axes_every_member_gets_the_same_answer():
    x = jnp.ones((2, 3)).at[1, 2].set(jnp.inf)

    def mapped(check, names):
        inner = jax.vmap(lambda x: check(x, axis_name=names), axis_name="j")
        return jax.vmap(inner, axis_name="i")(x)

    for names, finite in (("j", [True, False]), (("i", "j"), [False, False])):
        expected = np.repeat(finite, 3).reshape(2, 3)
        assert (mapped(ls.all_finite, names) == expected).all()
        assert (jnp.isfinite(mapped(ls.max_magnitude, names)) == expected).all()


@pytest.mark.parametrize("axis_name", ["data", 0, ("i", "data"), ("i", 0)])
@pytest.mark.parametrize("check", [ls.all_finite, ls.max_magnitude])
def test_an_unbound_axis_name_is_explained(check, axis_name):
    message = "`axis_name` must name an axis .* got " + re.escape(repr(axis_name))
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda x: check(x, axis_name=axis_name), axis_name="i")(jnp.ones(2))


def test_the_check_is_a_constant_to_derivatives():
    gradient = jax.jit(jax.grad(lambda x: jnp.where(ls.all_finite(x), x, 0.0) ** 2))
    assert float(gradient(3.0)) == 6.0


def found_everywhere():
    """Whether each kind of bad element is found in each type, and a step is skipped."""
    check, good = jax.jit(ls.all_finite), jnp.ones(100)
    cases = itertools.product(FLOATS[:4], BAD)
    found = [not check([good, np.array([1, x] * 50, jnp.dtype(t))]) for t, x in cases]
    tx = ls.with_loss_scaling(optax.sgd(0.1), ls.FixedLossScale(1.0))
    x = np.array([1, np.nan], np.float32)
    updates, _ = jax.jit(tx.update)(x, tx.init(x))
    return [*found, bool(check(good)), *np.signbit(updates).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("honored", ["true", "false"])
def test_no_flag_of_the_compiler_hides_a_nan(honored):
    """With such flags XLA takes x - x for 0, or comparisons with NaN for False."""
    flags = [f"--xla_cpu_fast_math_honor_{x}={honored}" for x in ("nans", "infs")]
    flags = " ".join(["--xla_cpu_enable_fast_math=true", *flags])
    command = [sys.executable, *WARNINGS_ARE_ERRORS, __file__]
    environment = worker_environment(XLA_FLAGS=flags)
    output = subprocess.check_output(command, env=environment, text=True)
    assert ast.literal_eval(output) == [True] * 15


if __name__ == "__main__":
    print(found_everywhere())
