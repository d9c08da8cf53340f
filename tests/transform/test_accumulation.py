"""Gradient accumulation: drop the bad micro-batch, or the window that it stands in."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from asserts import assert_same_bits
from book import code_blocks, page
from training import float16_loss, make_step, normal, train

import optax_lossscale as ls

RULE = ls.DynamicLossScale(init_scale=2.0**10)
PARAMS = {"w": jnp.array([[0.5, -1.0], [2.0, 0.25]]), "b": jnp.zeros(2)}
# Windows of four micro-batches of eight.
X, BAD_X = normal(3, 4, 8, 2), normal(3, 4, 8, 2)
BAD_X[1, 2, 0, 0] = 1e6  # overflows float16


def by_scan(tx):
    """The guide's recipe: the whole window in one jitted step, one check."""
    blocks = code_blocks(page("guides/wrappers"), "python")
    [recipe] = [block for block in blocks if "def accumulated_step" in block]
    namespace = {"jax": jax, "jnp": jnp, "optax": optax, "ls": ls}
    namespace |= {"loss_fn": float16_loss, "tx": tx, "batch": X[0].reshape(-1, 2)}
    namespace |= {"params": PARAMS, "opt_state": tx.init(PARAMS)}
    exec(compile(recipe, "wrappers.md", "exec"), namespace)
    return lambda *arguments: namespace["accumulated_step"](*arguments)[:2]


def by_microbatching(tx):
    mean = optax.microbatching.AccumulationType.MEAN

    @jax.jit
    def step(params, opt_state, window):
        fun = ls.value_and_grad(float16_loss, opt_state)
        accumulated = optax.microbatch(fun, 1, 8, accumulator=mean)
        _, grads = accumulated(params, window.reshape(-1, 2))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def whole(tx):
    return jax.jit(
        make_step(tx, lambda params, x: float16_loss(params, x.reshape(-1, 2)))
    )


def run(make_step, windows):
    tx = ls.with_loss_scaling(optax.adam(1e-2), RULE)
    return train(make_step(tx), PARAMS, tx.init(PARAMS), windows)


@pytest.mark.parametrize("make_step", [by_scan, by_microbatching])
def test_a_window_is_one_large_batch_and_dropped_as_one(make_step):
    """A bad micro-batch moves the scale once."""
    if make_step is by_microbatching and not hasattr(optax, "microbatch"):
        pytest.skip("needs a newer optax")
    actual, expected = run(make_step, X), run(whole, X)
    assert_same_bits(actual[1].scale_state, expected[1].scale_state)
    chex.assert_trees_all_close(actual, expected, rtol=2e-2, atol=1e-4)
    params, opt_state = run(make_step, BAD_X)
    expected_params, expected_state = run(make_step, X[[0, 2]])
    assert_same_bits(params, expected_params)
    assert_same_bits(opt_state.inner_state, expected_state.inner_state)
    assert int(opt_state.scale_state.skipped_steps) == 1
    assert float(opt_state.scale_state.loss_scale) == 2.0**9
