"""The five systems that share a page: their rules train, skip and resume."""

import functools

import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import PAGES, run_page

import optax_lossscale as ls

pytestmark = pytest.mark.slow
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
    params = run()["params" if system in ("apex", "mpx") else "half_params"]

    def step(batch):
        _, grads = ls.value_and_grad(ls.autocast(run()["loss_fn"]), state)(
            params, batch
        )
        updates, new_state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), new_state

    x, y = run()["batch"]
    trained, good = step((x, y))
    assert ls.was_applied(good) and not np.array_equal(trained["w"], params["w"])
    kept, bad = step((x.at[0, 0].set(1e6), y))  # too much for float16 alone
    assert not ls.was_applied(bad)
    assert_same_bits((kept, bad.inner_state), (params, state.inner_state))
    lowered = LOWERED.get(system, 0.5)
    assert ls.get_loss_scale(bad) == lowered * ls.get_loss_scale(state)


def test_the_guard_raises_when_fairseq_does():
    state = ls.get_loss_scale_state(run()["stopped_state"])
    assert state.consecutive_skips == 21 and state.loss_scale == 2.0**-13
    assert "training has stopped" in run()["printed"]
