"""The five systems that share a page: their rules train, skip and resume."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import PAGES, assert_same_bits, code_blocks, page, run_page

import optax_lossscale as ls

SYSTEMS = ["apex", "megatron", "deepspeed", "fairseq", "mpx"]
LOWERED = {"megatron": 0.5, "deepspeed": 1.0}  # by the first overflow, as it resumed
every_system = pytest.mark.parametrize("system", SYSTEMS)


@functools.cache
def run():
    return run_page(PAGES / "coming_from/index.md")


@every_system
def test_a_run_begun_there_goes_on_here(system):
    """The next finite step is one that grows; fairseq saves no counter."""
    state = run()[f"{system}_state"]
    rule = run()[f"{system}_rule"]
    assert ls.get_loss_scale(state) == 16384.0
    grown = 16384.0 if system == "fairseq" else 32768.0
    assert rule.update(state.scale_state, True).loss_scale == grown


@every_system
def test_a_step_trains_and_a_bad_one_changes_the_scale_alone(system):
    tx, state = run()[f"{system}_tx"], run()[f"{system}_state"]
    masters = optax.tree.get(state, "master_weights")
    params = run()["params" if masters is None else "half_params"]
    assert (masters is None) == (system in ("apex", "mpx"))

    def step(batch):
        _, grads = ls.value_and_grad(run()["loss_fn"], state)(params, batch)
        updates, new_state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), new_state

    x, y = run()["batch"]
    trained, good = step((x, y))
    assert ls.was_applied(good) and not np.array_equal(trained["w"], params["w"])
    if masters is not None:
        new = optax.tree.get(good, "master_weights")
        assert_same_bits(trained, jax.tree.map(jnp.float16, new))
    kept, bad = step((x.at[0, 0].set(1e6), y))  # too much for float16 alone
    assert not ls.was_applied(bad)
    assert_same_bits((kept, bad.inner_state), (params, state.inner_state))
    lowered = LOWERED.get(system, 0.5)
    assert ls.get_loss_scale(bad) == lowered * ls.get_loss_scale(state)


def test_a_run_of_deepspeed_goes_on_from_any_step():
    blocks = code_blocks(page("coming_from/index"), "python")
    (block,) = [code for code in blocks if '"cur_scale"' in code]
    resume = block.partition("\n}\n")[2]  # behind `saved = {...}`
    config = {**run()["config"], "loss_scale_window": 3}
    rule = ls.presets.deepspeed_fp16(**config)
    flags = [True] * 8 + [False, True, False, False] + [True] * 9
    states, last_overflow = [rule.init()], -1
    for step, finite in enumerate(flags):
        saved = {
            "cur_scale": float(states[0].loss_scale),
            "cur_iter": step,
            "last_overflow_iter": last_overflow,
            "cur_hysteresis": max(int(states[0].hysteresis_tracker), 1),
        }
        names = {"config": config, "deepspeed_rule": rule, "saved": saved}
        namespace = {**run(), **names}
        exec(resume, namespace)
        states.append(namespace["deepspeed_state"].scale_state)
        states = [rule.update(state, finite) for state in states]
        assert len({float(state.loss_scale) for state in states}) == 1
        last_overflow = last_overflow if finite else step


def test_the_guard_raises_when_fairseq_does():
    state = ls.get_loss_scale_state(run()["stopped_state"])
    assert 2.0**7 / 2**20 > 1e-4 > 2.0**7 / 2**state.consecutive_skips == 2.0**-14
    assert state.loss_scale == run()["fairseq_rule"].min_scale == 2.0**-13
    assert "training has stopped: The last 21 steps" in run()["printed"]
