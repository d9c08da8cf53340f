"""Gradient accumulation: drop the bad micro-batch, or the window that it stands in."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import code_blocks, page, run_blocks
from shared import recordings, slow_but
from training import float16_loss, make_step, normal, train

import optax_lossscale as ls
from optax_lossscale import presets

TX = ls.with_loss_scaling(optax.adam(1e-2), ls.DynamicLossScale(2.0**10))
PARAMS = {"w": np.float32([[0.5, -1.0], [2.0, 0.25]]), "b": np.zeros(2, np.float32)}
# Windows of four micro-batches of eight.
X, BAD_X = normal(3, 4, 8, 2), normal(3, 4, 8, 2)
BAD_X[1, 2, 0, 0] = 1e6  # overflows float16
WINDOW = X[0].reshape(-1, 2)


def by_scan(tx, loss_fn=float16_loss, params=PARAMS, batch=WINDOW):
    """The guide's recipe: the whole window in one jitted step, one check."""
    blocks = code_blocks(page("guides/wrappers"), "python")
    [recipe] = [block for block in blocks if "def accumulated_step" in block]
    recipe = recipe.replace(", value=loss", "")  # at which other systems do not look
    names = {"jax": jax, "jnp": jnp, "optax": optax, "ls": ls, "loss_fn": loss_fn}
    names |= {"tx": tx, "batch": batch, "params": params, "opt_state": tx.init(params)}
    step = run_blocks([recipe], "wrappers.md", names)["accumulated_step"]
    return lambda *arguments: step(*arguments)[:2]


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


@jax.jit
def large_step(params, opt_state, window):
    step = make_step(TX, float16_loss)
    return step(params, opt_state, window.reshape(-1, 2))


def run(step, windows):
    return train(step, PARAMS, TX.init(PARAMS), windows)


@pytest.mark.parametrize("make_step", [by_scan, by_microbatching])
def test_window_equals_one_large_batch_and_is_dropped_whole(make_step):
    """A bad micro-batch moves the scale once."""
    if make_step is by_microbatching and not hasattr(optax, "microbatch"):
        pytest.skip("needs a newer optax")
    step = make_step(TX)
    actual, expected = run(step, X), run(large_step, X)
    assert_same_bits(actual[1].scale_state, expected[1].scale_state)
    chex.assert_trees_all_close(actual, expected, rtol=2e-2, atol=1e-4)
    params, opt_state = run(step, BAD_X)
    expected_params, expected_state = run(step, X[[0, 2]])
    assert_same_bits(params, expected_params)
    assert_same_bits(opt_state.inner_state, expected_state.inner_state)
    assert int(opt_state.scale_state.skipped_steps) == 1
    assert float(opt_state.scale_state.loss_scale) == 2.0**9


SYSTEMS = {
    "keras.optimizers.LossScaleOptimizer": presets.keras_loss_scale,
    "torch.amp.GradScaler": presets.torch_grad_scaler,
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": presets.megatron,
}
# DeepSpeed since 2025 grows one step later after the start and after an overflow.
CASES = [x for x in recordings("accumulation")["cases"] if x["system"] in SYSTEMS]


def product(params, x):
    return jnp.mean(params * x)


@pytest.mark.parametrize("case", slow_but(CASES[::2], CASES), ids=lambda c: c["id"])
def test_scale_and_applied_steps_are_those_of_another_system(case):
    """Keras drops a micro-batch, and counts them. Others drop and count windows."""
    rule = SYSTEMS[case["system"]](**case["native_arguments"])
    x = np.float32([1.0 if flag == "1" else np.inf for flag in case["finite"]])
    count, inner, start = case["micro_batches"], optax.sgd(0.1), np.float32(1.0)
    if case["system"].startswith("keras"):
        tx = ls.with_loss_scaling(optax.MultiSteps(inner, count), rule)
        step = jax.jit(make_step(tx, product))
    else:
        tx = ls.with_loss_scaling(inner, rule)
        step, x = by_scan(tx, product, start, x[:4]), x.reshape(-1, count, 1)
    run, scales, moved = (start, tx.init(start)), [], ""
    for batch in x:
        old, run = run, step(*run, batch)
        scales.append(np.log2(ls.get_loss_scale(run[1])))
        moved += "1" if float(run[0]) != float(old[0]) else "0"
    np.testing.assert_array_equal(scales, case["log2_scale"])
    if "applied" in case:  # Megatron's are not recorded
        assert moved == case["applied"]
