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
        info = jnp.finfo(dtype)
        check = jax.jit(lambda tree: (ls.all_finite(tree), ls.max_magnitude(tree)))
        extremes = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0]
        good = np.resize(np.array(extremes, jnp.dtype(dtype)), (3, 17))
        ones = np.ones(7, good.dtype)
        finite, largest = check({"a": ones, "b": [good]})
        assert finite and ls.all_finite(good)
        assert (largest.shape, largest.dtype) == ((), jnp.float32)
        assert float(largest) == min(float(info.max), LARGEST)
        # float8_e4m3fn has no infinity: it holds a NaN instead
        both = [complex(x, y) for x, y in itertools.product((0, *BAD), BAD)]
        bad = [*BAD, *both] if "complex" in dtype else BAD
        for place, element in itertools.product(((0, 0), (1, 8), (2, 16)), bad):
            x = good.copy()
            x[place] = element
            finite, largest = check({"a": ones, "b": [x]})
            assert not finite and not np.isfinite(largest), (place, element)
        assert not ls.all_finite(x)


# Leaves that cannot hold a NaN, and a number.
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
OTHERS = {
    **{"int": jnp.int32(100), "bool": jnp.bool_(True), "int4": np.ones(2, jnp.int4)},
    **{"float0": np.zeros(2, jax.dtypes.float0), "key": KEY},
    **{"none": None, "masked": optax.MaskedNode(), "empty": np.zeros((0, 3))},
    **{"python": 1, "function": jax.nn.relu, "string": "relu", "number": -0.5},
}


def test_leaves_without_nan_are_finite_and_no_magnitude():
    assert ls.all_finite(OTHERS)
    assert float(jax.jit(lambda: ls.max_magnitude(OTHERS))()) == 0.5
    assert not ls.all_finite({**OTHERS, "python": float("nan")})
    assert not ls.all_finite({**OTHERS, "numpy": np.float32(np.inf)})
    empty = ({}, None, [], optax.MaskedNode())
    assert all(map(ls.all_finite, empty))
    assert all(jax.jit(lambda: [*map(ls.all_finite, empty)])())
    assert not any(jax.jit(lambda: [*map(ls.max_magnitude, empty)])())


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "float64", "complex128"])
def test_bits_tell_what_is_not_finite(dtype):
    with enable_x64(True):
        info = jnp.finfo(dtype)
        finite = [0.0, float(info.max), float(info.min), float(info.tiny)]
        x = np.array([*finite, *BAD]).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(jax.jit(is_nonfinite)(x), ~np.isfinite(x))


@pytest.mark.parametrize("jit", [True, False])
def test_one_nan_among_many_elements_is_the_largest_magnitude(jit):
    """XLA on CPU drops it from a maximum of floats."""
    measure = jax.jit(ls.max_magnitude) if jit else ls.max_magnitude
    x = np.ones(10_000, np.float32)
    for value in np.float32([np.nan, -np.nan]):
        x[77] = value
        assert np.isnan(measure([np.full_like(x, np.inf), x]))
        assert np.isnan(measure([np.ones_like(x), np.full_like(x, value)]))
    x[77] = -np.inf
    assert float(measure([np.ones_like(x), x])) == np.inf


def test_a_magnitude_beyond_float32_is_the_largest_float32():
    measure = jax.jit(ls.max_magnitude)
    assert float(measure(np.complex64([1, 3 + 4j]))) == 5.0
    beyond = np.complex64([1, 3e38 + 3e38j])
    assert float(measure(beyond)) == LARGEST and ls.all_finite(beyond)
    assert float(measure(np.complex64([np.inf, beyond[1]]))) == np.inf
    with enable_x64(True):
        assert float(measure(np.array([1.0, -1e300]))) == LARGEST
        assert float(measure(np.array([1.0, -np.inf]))) == np.inf


def test_along_named_axes_every_member_gets_the_same_answer():
    x = np.float32([[1, 1, 1], [1, 1, np.inf]])

    def mapped(check, names):
        inner = jax.vmap(lambda x: check(x, axis_name=names), axis_name="j")
        return np.asarray(jax.jit(jax.vmap(inner, axis_name="i"))(x))

    for names, finite in (("j", [True, False]), (("i", "j"), [False, False])):
        expected = np.repeat(finite, 3).reshape(2, 3)
        assert (mapped(ls.all_finite, names) == expected).all()
        assert (np.isfinite(mapped(ls.max_magnitude, names)) == expected).all()


@pytest.mark.parametrize("axis_name", ["data", 0, ("i", "data"), ("i", 0)])
@pytest.mark.parametrize("check", [ls.all_finite, ls.max_magnitude])
def test_an_unbound_axis_name_is_explained(check, axis_name):
    message = "`axis_name` must name an axis .* got " + re.escape(repr(axis_name))
    mapped = jax.vmap(lambda x: check(x, axis_name=axis_name), axis_name="i")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, np.ones(2))


def test_the_check_is_a_constant_to_derivatives():
    gradient = jax.jit(jax.grad(lambda x: jnp.where(ls.all_finite(x), x, 0.0) ** 2))
    assert float(gradient(3.0)) == 6.0


def test_update_grows_linearly_with_the_number_of_arrays():
    """Every mask reads one flag, and does not combine those of all arrays again."""
    tx = ls.with_loss_scaling(optax.adam(0.1))

    def operations(number):
        params = [np.ones(8, np.float32)] * number
        update = jax.jit(tx.update).lower(params, tx.init(params), params)
        return update.compile().as_text().count(" = ")

    assert operations(100) < 4.2 * operations(25)


def found_everywhere():
    """Whether each kind of bad element is found in each type, and a step is skipped."""
    check, good = jax.jit(ls.all_finite), np.ones(100, np.float32)
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
    assert {*ast.literal_eval(output)} == {True}


if __name__ == "__main__":
    print(found_everywhere())
