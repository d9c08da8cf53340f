"""Updates that take narrow parameters to their rounded master weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

from optax_lossscale._transform.rounding import update_to


@pytest.mark.parametrize("sign", [1, -1])
def test_update_leads_to_the_rounded_master_weight(sign):
    """From numbers below 1 to all numbers, to ties between them and beyond them."""
    numbers = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)
    exact = numbers.astype(np.float32)
    ties = exact - np.diff(exact, prepend=np.float32(0)) / 2
    near = [np.nextafter(ties, np.float32(end)) for end in (0, np.inf)]
    masters = sign * np.concatenate([exact, ties, *near, [65520, 3e38, np.inf, np.nan]])
    masters = masters.astype(np.float32)
    params = np.random.default_rng(0).choice(numbers[:0x3BFF], len(masters))
    with np.errstate(over="ignore"):
        expected = masters.astype(np.float16)
    for start in (params, -params, 0 * params):
        updates = jax.jit(update_to)(masters, start)
        assert updates.dtype == jnp.float32
        new = optax.apply_updates(start, updates)
        np.testing.assert_array_equal(new, expected)
    assert_same_bits(new, expected)  # from 0, also the sign of a zero


@pytest.mark.parametrize(
    ("dtype", "limit", "error"),
    [("float16", 2**13, 2.0**-24), ("bfloat16", 2**16, 2.0**-23)],
)
def test_a_weight_that_falls_far_is_off_until_the_next_step(dtype, limit, error):
    """float32 sums cannot do better; one more step can."""
    rng = np.random.default_rng(0)
    params = (2.0 ** rng.uniform(0, 10, 2000)).astype(jnp.dtype(dtype))
    old = params.astype(np.float32)
    masters = old * np.float32(2.0 ** rng.uniform(-20, 3, 2000))
    target = masters.astype(params.dtype).astype(np.float32)
    new = optax.apply_updates(params, jax.jit(update_to)(masters, params))
    off = np.asarray(new, np.float32) != target
    assert off.any() and (old / masters > limit)[off].all()
    assert (np.abs(np.asarray(new, np.float32) - target) <= error * old).all()
    newer = optax.apply_updates(new, jax.jit(update_to)(masters, new))
    np.testing.assert_array_equal(np.asarray(newer, np.float32), target)
