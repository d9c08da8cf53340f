"""The programs of all migration guides train, skip, save and resume."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from guides import GUIDES, TRAININGS, every_guide, every_training, run
from helpers import assert_same_bits, code_blocks, kept
from jax.sharding import PartitionSpec as P

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
    masters = optax.tree.get(state, "master_weights")
    assert (
        masters is None
        or "half" in training.name
        or training.guide in (*("megatron_lm", "deepspeed", "fairseq"),)
    )
    if masters is not None:
        assert_same_bits(state[0], jax.tree.map(jnp.float16, masters))


@every_training
def test_a_bad_batch_changes_the_scale_alone_and_a_good_one_is_counted(training):
    def counts(state):
        return [int(n) for _, n in optax.tree.get_all_with_path(state, "count")]

    before = training.start()
    good = training.step(before, training.data())
    assert ls.was_applied(good)
    assert counts(good) == [count + 1 for count in counts(before)]
    assert len(counts(good)) == (1 if training.guide == "apex" else 2)

    before = training.start()
    bad = training.step(before, training.data(bad=True))
    assert not ls.was_applied(bad)
    assert_same_bits(kept(bad), kept(before))
    old, new = ls.get_loss_scale_state(before), ls.get_loss_scale_state(bad)
    assert new.loss_scale == training.backoff * old.loss_scale


SAVED = dict.fromkeys(["pytorch", "apex", "deepspeed"], "checkpoint")
SAVED |= dict.fromkeys(["keras", "megatron_lm", "mpx"], "restored")


@pytest.mark.parametrize("guide", SAVED)
def test_what_was_restored_is_what_was_trained(guide):
    page = run(guide)
    restored = page[SAVED[guide]]
    if guide == "megatron_lm":
        restored = (page["params"], restored)
    elif guide != "mpx":
        restored = (restored["params"], restored["opt_state"])
    trained = next(t for t in TRAININGS if t.guide == guide).start()
    assert_same_bits(restored, trained)


CONVERTED = {"pytorch": "torch", "keras": "keras", "jmp": "jmp"}
CONVERTED |= {"flax_dynamic_scale": "flax", "megatron_lm": "megatron"}


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


def test_a_run_of_deepspeed_goes_on_from_any_step():
    page = run("deepspeed")
    last_block = code_blocks(GUIDES["deepspeed"].read_text(), "python")[-1]
    resume = last_block.partition("\n}\n")[2]  # behind `saved = {...}`
    config = {"fp16": {**page["config"]["fp16"], "loss_scale_window": 3}}
    rule = ls.presets.deepspeed_fp16(**config["fp16"])
    flags = [True] * 8 + [False, True, False, False] + [True] * 9
    states, last_overflow = [rule.init()], -1
    for step, finite in enumerate(flags):
        saved = {
            "cur_scale": float(states[0].loss_scale),
            "cur_iter": step,
            "last_overflow_iter": last_overflow,
            "cur_hysteresis": max(int(states[0].hysteresis_tracker), 1),
        }
        namespace = {**page, "config": config, "rule": rule, "saved": saved}
        exec(resume, namespace)
        states.append(namespace["resumed_state"].scale_state)
        states = [rule.update(state, finite) for state in states]
        assert len({float(state.loss_scale) for state in states}) == 1
        last_overflow = last_overflow if finite else step


def test_zero_shards_the_optimizer_state_and_trains_alike():
    page = run("deepspeed")
    for name in ("master_weights", "mu", "nu"):
        moments = optax.tree.get(page["zero_state"], name)
        specs = {key: moment.sharding.spec for key, moment in moments.items()}
        assert specs == {"w1": P("data"), "b1": P("data"), "w2": P("data"), "b2": P()}
    for name, param in page["zero_params"].items():
        assert param.sharding.spec == P()
        np.testing.assert_allclose(param, page["params"][name], atol=2e-2)


def test_apex_lowers_the_scale_of_the_loss_that_overflows_and_skips_for_all():
    page = run("apex")
    x, y = page["x"][0], page["y"][0]
    huge = jnp.full_like(y, 1e16)  # too much for the gradients of the first loss
    start, before = (page["two_params"], page["two_state"]), page["scale_states"]
    *bad, after = page["two_loss_step"](*start, before, x, huge)
    pairs = zip(after, before, strict=True)
    assert [float(new.loss_scale / old.loss_scale) for new, old in pairs] == [0.5, 1.0]
    assert not ls.was_applied(bad[1])
    assert_same_bits(kept(bad), kept(list(start)))
    assert ls.was_applied(page["two_loss_step"](*start, before, x, y)[1])


def test_the_guard_raises_when_fairseq_does():
    page = run("fairseq")
    state = ls.get_loss_scale_state(page["stopped_state"])
    assert 2.0**7 / 2**20 > 1e-4 > 2.0**7 / 2**state.consecutive_skips == 2.0**-14
    assert state.loss_scale == page["rule"].min_scale == 2.0**-13
    assert "training has stopped: The last 21 steps" in page["printed"]


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
