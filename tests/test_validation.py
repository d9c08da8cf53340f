"""The checks at the door: what passes at, below and above each bound."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import _validation as validation

number = functools.partial(
    validation.check_number, least=1.0, largest=8.0, advice="Way out."
)
factor = functools.partial(
    validation.check_number, least=1.0, largest=2.0, advice="Way out.", is_open=True
)
count = functools.partial(validation.check_count, advice="Way out.")
real = functools.partial(validation.check_scalar, kind="real number", advice="Way out.")
choice = functools.partial(
    validation.check_choice, choices=("one", "two"), advice="Way out."
)
switch = functools.partial(validation.check_switch, advice="Way out.")
function = functools.partial(validation.check_function, advice="Way out.")
NAN, LARGEST = math.nan, 2**31 - 1

# What each check takes, and what it refuses.
CASES = [
    (number, [1, 1.0, 8.0, np.float16(3), jnp.float32(2), 2], [0.999, 8.001, NAN]),
    (number, [np.int8(5)], [True, np.True_, "2", None, [2.0], np.ones(1), 2j]),
    (factor, [1.5, 1 + 1e-6, 2 - 1e-6], [1, 2, 1 + 1e-9, 2 - 1e-9, NAN, "1.5", True]),
    (count, [1, LARGEST, 3.0, np.int64(7), jnp.int32(7)], [0, LARGEST + 1, 1.5, NAN]),
    (functools.partial(count, least=0), [0, 1], [-1, None, False]),
    (real, [0, -1.5, np.float64(2), jnp.float16(1)], [None, "1", 1j, True, np.ones(1)]),
    (switch, [True, False], [0, 1, None, np.True_]),
    (choice, ["one", "two"], ["three", 1, None]),
    (function, [len, lambda: 0, int], [None, 1, "len"]),
    (validation.check_dtype, ["float16", jnp.bfloat16, np.float64], ["int8", None, 3]),
    (validation.check_scale, [1, 0.5, jnp.float32(3)], [0, -1, math.inf, NAN, True]),
    (validation.check_scale, [np.float64(2)], [jnp.ones(2), jnp.bool_(True), "1"]),
    (validation.check_flag, [True, jnp.bool_(False), np.True_], [1, None, 0.0]),
    (validation.check_flag, [], [jnp.ones(1, bool), jnp.int32(1)]),
]


@pytest.mark.parametrize(("check", "good", "bad"), CASES)
def test_a_check_takes_what_is_within_its_bounds_and_nothing_else(check, good, bad):
    for value in good:
        check("argument", value)
    for value in bad:
        with pytest.raises((ValueError, TypeError), match="^`argument` must .*got "):
            check("argument", value)


def test_numbers_become_those_of_python():
    assert (
        type(number("x", jnp.float32(2))) is type(factor("x", np.float32(1.5))) is float
    )
    assert type(count("x", 3.0)) is int and count("x", 3.0) == 3
    assert validation.check_dtype("x", jnp.float16) == "float16"


def test_a_traced_number_is_refused_by_name():
    for check in (number, factor, count):
        with pytest.raises(
            ValueError, match="^`x` must be a plain number, got a traced"
        ):
            jax.jit(lambda x, check=check: check("x", x))(2.0)
    with pytest.raises(ValueError, match="^`x` must hold concrete numbers"):
        jax.jit(lambda x: validation.check_concrete("x", [x], "Way out."))(2.0)
    validation.check_concrete("x", [1.0, jnp.ones(2)], "Way out.")


def test_arguments_in_order_may_be_equal():
    validation.check_order(low=1.0, middle=1.0, high=2.0)
    with pytest.raises(
        ValueError, match="`middle` must not exceed `high`, got middle=3"
    ):
        validation.check_order(low=1.0, middle=3.0, high=2.0)


def test_values_are_described_in_a_few_words():
    assert validation.describe("x" * 78) == repr("x" * 78)
    assert validation.describe("x" * 79) == "an object of type str"
    assert "dtype float16 and shape (2,)" in validation.describe(jnp.ones(2, "float16"))
    abstract = validation.describe(jax.ShapeDtypeStruct((), jnp.float32))
    assert "holds no number" in abstract
