"""The programs of all migration guides train, skip, save and resume."""

import numpy as np
import optax
import pytest
from guides import TRAININGS, every_guide, every_training, run
from helpers import assert_same_bits, assert_same_types, kept

import optax_lossscale as ls

pytestmark = pytest.mark.slow


@every_training
def test_every_program_trains(training):
    page, state = run(training.guide), training.start()
    losses = np.array(page["losses"])
    assert losses[-1] < 0.05 * losses[0]
    shown = losses.mean() if training.guide == "keras" else losses[-1]
    assert f"loss {shown:.4f}" in page["printed"]
    assert ls.all_finite(state)


@every_training
def test_a_bad_batch_changes_the_scale_alone_and_a_good_one_is_counted(training):
    def counts(state):
        return [int(n) for _, n in optax.tree.get_all_with_path(state, "count")]

    before = training.start()
    good = training.step(before, training.data())
    assert ls.was_applied(good)
    assert counts(good) == [count + 1 for count in counts(before)]
    assert len(counts(good)) == 2

    before = training.start()
    bad = training.step(before, training.data(bad=True))
    assert not ls.was_applied(bad)
    assert_same_bits(kept(bad), kept(before))
    old, new = ls.get_loss_scale_state(before), ls.get_loss_scale_state(bad)
    assert new.loss_scale == training.backoff * old.loss_scale


SAVED = {"pytorch": "checkpoint", "keras": "restored"}


@pytest.mark.parametrize("guide", SAVED)
def test_what_was_restored_is_what_was_trained(guide):
    page = run(guide)
    saved = page[SAVED[guide]]
    restored = saved["params"], saved["opt_state"]
    trained = next(t for t in TRAININGS if t.guide == guide).start()
    assert_same_bits(restored, trained)


@every_guide
def test_a_run_begun_there_goes_on_here(guide):
    """With the scale and the counter: the next finite step is one that grows."""
    page = run(guide)
    state, rule = page["resumed_state"], page["rule"]
    assert ls.get_loss_scale(state) == 16384.0
    assert rule.update(state.scale_state, True).loss_scale == 32768.0
    assert_same_bits(state.inner_state, page.get("old_opt_state", state.inner_state))
    assert_same_types(state.scale_state, rule.init())


def test_the_fixed_scale_of_tensorflow_trains_and_applies_every_step():
    page = run("tensorflow")
    assert f"loss {page['value']:.4f}" in page["printed"] and page["should_apply"]
    x = page["x"][0].copy()
    x[0, 0] = np.inf
    start = page["constant_params"], page["constant_state"]
    params, state, _ = page["constant_step"](*start, x, page["y"][0])
    assert ls.was_applied(state) and ls.get_loss_scale(state) == 128.0
    assert not ls.all_finite(params)


def test_a_training_cell_of_mindspore_returns_loss_overflow_and_scale():
    page = run("mindspore")
    assert (page["overflow"], page["scale"]) == (False, 2.0**14)
    x = page["x"][0].copy()
    x[0, 0] = 1e6  # too much for float16 alone
    start = page["cell_params"], page["cell_state"]
    params, state, _ = page["train"](*start, x, page["y"][0])
    assert not ls.was_applied(state) and ls.get_loss_scale(state) == 2.0**13
    assert_same_bits(params, start[0])
