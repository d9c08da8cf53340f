"""Rounding to narrow types, and updates that take parameters there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

from optax_lossscale._transform.rounding import rounded, update_to


def every_kind(dtype):
    """All numbers of a small type, ties between them, what lies beside, and more."""
    bits = np.dtype(dtype).itemsize * 8
    numbers = np.arange(2 ** (bits - 1), dtype=f"uint{bits}").view(np.dtype(dtype))
    numbers = numbers.astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    numbers = numbers[(numbers == 0) | (numbers >= np.finfo(np.float32).tiny)]
    ties = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    beyond = [np.inf, np.nan, 65519.0, 65520.0, 3e38, 2.0**-25, 2.0**-26]
    beyond.append(np.array(2**31 - 1, np.int32).view(np.float32))  # another NaN
    x = [numbers, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.inf)]
    x = np.concatenate([*x, beyond]).astype(np.float32)
    return np.concatenate([x, -x])


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn]
)
def test_rounding_is_that_of_a_cast(dtype):
    x = jnp.asarray(every_kind(dtype))
    y = jax.jit(rounded, static_argnums=1)(x, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.asarray(x).astype(dtype)
    overflows = ~np.isfinite(expected.astype(np.float32))
    # Not the cast alone: where it is finite, the rounded number is of the narrow type.
    np.testing.assert_array_equal(
        np.where(overflows, 0, y), np.where(overflows, 0, expected).astype(np.float32)
    )
    signs = np.signbit(y) == np.signbit(np.asarray(x))
    assert (signs | np.isnan(y)).all()
    # What overflows is still beyond the largest number, so that a cast overflows too.
    again = np.asarray(y.astype(dtype)).astype(np.float32)
    assert (~np.isfinite(again[overflows])).all()


def test_an_update_takes_a_parameter_to_its_rounded_master_weight():
    """From any float16 number below 1 to any other, and back to bits of zeros."""
    rng = np.random.default_rng(0)
    small = np.arange(0x3C00, dtype=np.uint16).view(np.float16)
    zeros = np.array([0.0, 1e-30, 2.0**-26], np.float32)
    params = np.concatenate([rng.choice(small, 2000), np.zeros(12, np.float16)])
    params *= rng.choice([-1, 1], len(params)).astype(np.float16)
    masters = rng.standard_normal(2000) * 2.0 ** rng.uniform(-30, 10, 2000)
    masters = np.concatenate([masters, zeros, -zeros, zeros, -zeros]).astype(np.float32)
    updates = jax.jit(update_to)(jnp.asarray(masters), jnp.asarray(params))
    assert updates.dtype == jnp.float32
    new = optax.apply_updates(jnp.asarray(params), updates)
    np.testing.assert_array_equal(new, masters.astype(np.float16))
    # From 0 also to the zero of the other sign, if the master weight is not 0.
    signed = (params == 0) & (masters != 0)
    assert_same_bits(new[signed], jnp.asarray(masters.astype(np.float16)[signed]))


@pytest.mark.parametrize(
    ("dtype", "limit", "error"),
    [("float16", 2**13, 2.0**-24), ("bfloat16", 2**16, 2.0**-23)],
)
def test_a_weight_that_falls_far_is_off_until_the_next_step(dtype, limit, error):
    """float32 sums cannot do better; one more step can."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(2.0 ** rng.uniform(0, 10, 2000), dtype)
    masters = params.astype(jnp.float32) * jnp.asarray(
        2.0 ** rng.uniform(-20, 3, 2000), jnp.float32
    )
    target = np.asarray(masters.astype(dtype), np.float32)
    new = optax.apply_updates(params, update_to(masters, params))
    off = np.asarray(new, np.float32) != target
    old = np.asarray(params, np.float32)
    assert off.any() and (old / masters > limit)[off].all()
    assert (np.abs(np.asarray(new, np.float32) - target) <= error * old).all()
    np.testing.assert_array_equal(
        optax.apply_updates(new, update_to(masters, new)), masters.astype(dtype)
    )
