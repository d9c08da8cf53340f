"""The masked update: what a skipped step keeps, whatever the optimizer computes.

What is promised of its numbers, `test_random_optimizers` and `test_optimizers` check.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from jax.experimental import io_callback
from training import transformation

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

NUMBERS = np.float32([-0.0, 0.0, 1.0, -1.5, np.inf, -np.inf])
ONE = np.ones(3, np.float32)
BAD = np.float32([1.0, np.nan, 2.0])


def test_added_to_any_number_a_skipped_update_changes_no_bit():
    """Also of -0.0, to which adding 0.0 makes 0.0."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2)
    params = [NUMBERS.astype(dtype) for dtype in dtypes]
    params += [np.complex64([complex(x, -0.0) for x in NUMBERS])]
    params += [np.array([True, False]), np.int32([-(2**31), 2**31 - 1, 0])]
    tx = ls.with_loss_scaling(optax.identity())
    # An infinity is among them.
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert [u.dtype for u in updates] == [p.dtype for p in params]

    @jax.jit
    def add(params, updates):
        pairs = zip(params, updates, strict=True)
        return [p | u if p.dtype == bool else p + u for p, u in pairs]

    assert_same_bits(add(params, updates), params)


@pytest.mark.parametrize("check_updates", [False, True])
def test_effects_happen_once_in_a_step(check_updates):
    seen = []

    def update(g, m):
        jax.debug.callback(lambda m: seen.append(("debug", float(m[0]))), m)
        total = io_callback(
            lambda m: seen.append(("io", float(m[0]))) or m, m, m, ordered=True
        )
        return g, (total + g,)

    inner = transformation(update, ONE)
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    step = jax.jit(lambda g, state: tx.update(g, state)[1])
    step(BAD, step(ONE, step(BAD, tx.init(ONE))))
    jax.effects_barrier()
    expected = [(kind, m) for m in (1.0, 1.0, 2.0) for kind in ("debug", "io")]
    assert sorted(seen) == sorted(expected)


def test_two_leaves_of_one_value_keep_the_old_value_of_each():
    def update(g, a, b):
        total = a + b + g
        return total, (total, total)

    tx = ls.with_loss_scaling(transformation(update, ONE, 2 * ONE))
    state = tx.init(ONE)
    _, skipped = jax.jit(tx.update)(BAD, state)
    assert_same_bits(skipped.inner_state, state.inner_state)
    _, applied = jax.jit(tx.update)(ONE, state)
    assert_same_bits(applied.inner_state, (4 * ONE, 4 * ONE))


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2), (3, 5)])
def test_placeholders_are_neither_zero_nor_their_mean(shape):
    """There a norm and a standard deviation have no derivative."""
    seen = []

    def update(g):
        seen.append(np.asarray(g))
        return g, ()

    tx = ls.with_loss_scaling(transformation(update))
    bad = np.full(shape, np.nan, np.float32)
    tx.update(bad, tx.init(bad))
    [placeholders] = seen
    assert np.all(np.float16(1e-3) * np.float16(placeholders) ** 2 > 0)
    assert np.all(placeholders != placeholders.mean())
