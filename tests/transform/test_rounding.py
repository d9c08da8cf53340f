"""Updates that take narrow parameters to their rounded master weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from shared import enable_x64

import optax_lossscale as ls

TX = ls.with_master_weights(optax.stateless(lambda updates, params: updates))


@jax.jit
def step_to(masters, params, state):
    """One step after which the master weights are these."""
    # The difference and its sum with the parameter are exact in float64.
    difference = masters - params.astype(jnp.float64)
    updates, state = TX.update(difference, state, params)
    assert updates.dtype == jnp.float32
    return optax.apply_updates(params, updates), state


def set_to(masters, params):
    """The parameters after an update that makes their master weights these."""
    with enable_x64(True):
        new, state = step_to(masters, params, TX.init(params))
    np.testing.assert_array_equal(state.master_weights, masters)
    return new


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_update_leads_to_the_rounded_master_weight(sign):
    """From float16 numbers below 1 to each one, each tie, its neighbors, and beyond."""
    numbers = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)
    exact = numbers.astype(np.float32)
    ties = exact - np.diff(exact, prepend=np.float32(0)) / 2
    near = [np.nextafter(ties, np.float32(end)) for end in (0, np.inf)]
    masters = sign * np.concatenate([exact, ties, *near, [65520, 3e38, np.inf, np.nan]])
    masters = masters.astype(np.float32)
    params = np.random.default_rng(0).choice(numbers[:0x3BFF], len(masters))
    with np.errstate(over="ignore"):
        expected = masters.astype(np.float16)
    for start in (params, -params):
        np.testing.assert_array_equal(set_to(masters, start), expected)
    from_0 = np.asarray(set_to(masters, 0 * params))
    # Also the sign of a zero. A GPU returns another NaN.
    assert np.isnan(from_0[-1])
    assert_same_bits(from_0[:-1], expected[:-1])


@pytest.mark.parametrize(
    ("dtype", "limit", "error"),
    [("float16", 2**13, 2.0**-24), ("bfloat16", 2**16, 2.0**-23)],
    ids=["float16", "bfloat16"],
)
def test_weight_that_falls_far_continues_from_the_parameter(dtype, limit, error):
    """One float32 update cannot hold the difference. The next one starts from there."""
    rng = np.random.default_rng(0)
    params = (2.0 ** rng.uniform(0, 10, 2000)).astype(jnp.dtype(dtype))
    old = params.astype(np.float32)
    masters = old * np.float32(2.0 ** rng.uniform(-20, 3, 2000))
    target = masters.astype(params.dtype).astype(np.float32)
    new = set_to(masters, params)
    difference = np.abs(np.asarray(new, np.float32) - target)
    assert difference.any() and (old / masters > limit)[difference > 0].all()
    assert (difference <= error * old).all()
    state = ls.MasterWeightsState(masters, optax.EmptyState())
    updates, state = TX.update(np.zeros_like(masters), state, new)
    assert_same_bits(optax.apply_updates(new, updates), new)
    kept = np.where(difference > 0, np.asarray(new, np.float32), masters)
    np.testing.assert_array_equal(state.master_weights, kept)
