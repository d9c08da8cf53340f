"""The programs of all migration guides train, skip, save and resume."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from guides import (
    GUIDES,
    TRAININGS,
    counts,
    every_guide,
    every_training,
    kept,
    params_and_opt_state,
    run,
)
from helpers import assert_same_bits

import optax_lossscale as ls


@pytest.mark.slow
@every_training
def test_every_program_trains(training):
    page = run(training.guide)
    losses = np.array(page["losses"])
    assert losses[-1] < 0.05 * losses[0]
    shown = losses.mean() if training.guide == "keras" else losses[-1]
    assert f"loss {shown:.4f}" in page["printed"]
    assert ls.all_finite(training.start())


@pytest.mark.slow
@every_training
def test_a_bad_batch_changes_the_scale_alone(training):
    before = training.start()
    after = training.run(before, training.data(bad=True))
    assert_same_bits(kept(after), kept(before))
    old, new = ls.get_loss_scale_state(before), ls.get_loss_scale_state(after)
    assert new.loss_scale == training.backoff * old.loss_scale
    assert new.skipped_steps == old.skipped_steps + 1
    assert not ls.was_applied(after)


@pytest.mark.slow
@every_training
def test_a_good_batch_is_counted_by_optimizer_and_schedule(training):
    before = training.start()
    after = training.run(before, training.data())
    assert ls.was_applied(after)
    assert counts(after) == [count + 1 for count in counts(before)]
    assert len(counts(after)) == (1 if training.guide == "apex" else 2)


@pytest.mark.slow
@every_guide
def test_what_was_saved_is_what_was_trained(guide):
    page = run(guide)
    params, opt_state = params_and_opt_state(TRAININGS[guide].start())
    whole = {"params": params, "opt_state": opt_state}
    if guide in ("pytorch", "apex", "deepspeed"):
        assert_same_bits(page["checkpoint"], whole)
    elif guide == "keras":
        assert_same_bits(page["restored"], whole)
    elif guide == "mpx":
        assert_same_bits(page["restored"], (params, opt_state))
    elif guide == "flax_dynamic_scale":
        restored = serialization.from_bytes(page["state"], page["checkpoint"])
        assert_same_bits(restored.opt_state, opt_state)
    else:
        target = whole if guide == "tensorflow" else opt_state
        saved = serialization.to_bytes(target)
        assert "path" not in page or page["path"].read_bytes() == saved
        assert_same_bits(serialization.from_bytes(target, saved), target)


CONVERTED = {"pytorch": "torch", "keras": "keras", "jmp": "jmp"}
CONVERTED |= {"flax_dynamic_scale": "flax", "megatron_lm": "megatron"}


@pytest.mark.slow
@every_guide
def test_a_run_begun_there_goes_on_here(guide):
    """With the scale and the counter: the next finite step is one that grows.

    fairseq saves no counter.
    """
    page = run(guide)
    state, rule = page["resumed_state"], page["rule"]
    assert ls.get_loss_scale(state) == 16384.0
    grown = 16384.0 if guide == "fairseq" else 32768.0
    assert rule.update(state.scale_state, True).loss_scale == grown
    assert_same_bits(state.inner_state, page.get("old_opt_state", state.inner_state))
    if guide in CONVERTED:
        back = getattr(ls.presets, f"to_{CONVERTED[guide]}_state_dict")
        assert back(state, rule) == page["saved"]


@pytest.mark.slow
def test_pytorchs_window_is_accumulated():
    """The mean over micro-batches is the gradient of the whole window."""
    page = run("pytorch")
    [code] = re.findall(
        r"^@jax.jit\ndef train_step.*?\n\n\n",
        GUIDES["pytorch"].read_text(),
        re.M | re.S,
    )
    keep_grads = optax.GradientTransformation(
        lambda params: params, lambda grads, state, params=None: (grads, grads)
    )
    tx = ls.with_loss_scaling(keep_grads, ls.FixedLossScale(64.0))
    namespace = {**page, "tx": tx}
    exec(code, namespace)
    params = jax.tree.map(jnp.ones_like, page["params"])
    ((x, y),) = TRAININGS["pytorch"].data()
    _, opt_state, loss = namespace["train_step"](params, tx.init(params), (x, y))
    assert ls.was_applied(opt_state)

    window = (x.reshape(-1, 8), y.reshape(-1, 1))
    # The loss of a micro-batch is divided by their number.
    value_and_grad = jax.value_and_grad(lambda *args: 4 * page["loss_fn"](*args))
    expected = jax.jit(value_and_grad)(params, window)
    close = functools.partial(np.testing.assert_allclose, rtol=0.01)
    jax.tree.map(close, (loss, opt_state.inner_state), expected)


MASTER_WEIGHTS = {
    "apex O2": TRAININGS["apex O2"],
    **{name: TRAININGS[name] for name in ("megatron_lm", "deepspeed", "fairseq")},
}


@pytest.mark.slow
@pytest.mark.parametrize("training", MASTER_WEIGHTS.values(), ids=MASTER_WEIGHTS)
def test_float16_parameters_are_the_rounded_master_weights(training):
    params, opt_state = training.start()
    masters = optax.tree.get(opt_state, "master_weights")
    assert_same_bits(params, jax.tree.map(jnp.float16, masters))
    assert {p.dtype for p in jax.tree.leaves(masters)} == {np.dtype("float32")}
