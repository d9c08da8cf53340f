"""Skipped updates: zeros that change no bit of what they are added to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

NUMBERS = [-0.0, 0.0, 1.0, -1.5, jnp.inf, -jnp.inf]


@pytest.mark.parametrize("jit", [False, True])
def test_added_to_any_number_a_skipped_update_changes_no_bit(jit):
    """Also of -0.0, to which adding 0.0 makes 0.0."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64)
    params = [jnp.array(NUMBERS).astype(dtype) for dtype in dtypes]
    params += [jnp.array([True, False]), jnp.array([-(2**31), 2**31 - 1, 0])]
    tx = ls.with_loss_scaling(optax.identity())
    step = jax.jit(tx.update) if jit else tx.update
    updates, _ = step(params, tx.init(params), params)  # an infinity is among them
    assert [u.dtype for u in updates] == [p.dtype for p in params]
    pairs = zip(params, updates, strict=True)
    new_params = [p | u if p.dtype == bool else p + u for p, u in pairs]
    assert_same_bits(new_params, params)


def test_updates_of_a_type_without_a_zero_are_refused():
    to_e8m0 = optax.stateless(lambda g, params: g.astype(jnp.float8_e8m0fnu))
    tx = ls.with_loss_scaling(to_e8m0)
    with pytest.raises(ValueError, match="type that has a zero.*float8_e8m0fnu"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


def test_what_addition_itself_changes_can_be_kept():
    """XLA on CPU flushes subnormal numbers, and float32 holds no 2**24 + 1."""
    params = [
        jnp.array([3e-45, 1.0], jnp.float32),
        jnp.array([1e-40, 1.0], jnp.bfloat16),
        jnp.array([2**24 + 1, 1], jnp.int32),
        jnp.array([6e-8, 1.0], jnp.float16),
    ]
    tx = ls.with_loss_scaling(optax.identity())
    grads = [jnp.full(2, jnp.nan)] * 4
    updates, state = tx.update(grads, tx.init(params), params)
    new_params = jax.jit(optax.apply_updates)(params, updates)
    pairs = zip(new_params, params, strict=True)
    flushed = jax.default_backend() == "cpu"
    kept = [np.asarray(p).tobytes() == np.asarray(q).tobytes() for p, q in pairs]
    assert kept == [not flushed, not flushed, False, True]
    assert_same_bits(ls.keep_if_applied(state, new_params, params), params)
