"""DynamicLossScale against the statements of its documentation."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_rule

import optax_lossscale as ls


def documented(rule, flags):
    """The scale and both trackers after each step."""
    scale, growth, hysteresis = rule.init_scale, 0, rule.hysteresis
    for grads_finite in flags:
        grown = changed = False
        if grads_finite:
            growth += 1
            if growth >= rule.growth_interval:
                scale = min(scale * rule.growth_factor, rule.max_scale)
                growth, grown, changed = 0, True, True
        else:
            growth = 0
            hysteresis = max(hysteresis - 1, 0)
            if hysteresis == 0:
                scale, changed = max(scale * rule.backoff_factor, rule.min_scale), True
        refills = {"finite": grads_finite, "growth": grown, "change": changed}
        if refills[rule.hysteresis_refill]:
            hysteresis = rule.hysteresis
        yield scale, growth, hysteresis


@pytest.mark.parametrize("refill", ["finite", "growth", "change"])
def test_the_rule_does_as_documented(refill):
    """Systems with each of the three have recordings in `test_conformance`."""
    rule = ls.DynamicLossScale(
        8.0,
        growth_factor=1.5,
        backoff_factor=0.75,
        growth_interval=3,
        min_scale=2.0,
        max_scale=20.0,
        hysteresis=2,
        hysteresis_refill=refill,
    )
    flags = np.random.default_rng(0).random(250) > np.repeat([0.1, 0.6], 125)
    states = run_rule(rule, flags)
    columns = states.loss_scale, states.growth_tracker, states.hysteresis_tracker
    expected = np.array(list(documented(rule, flags)))
    np.testing.assert_allclose(np.stack(columns, 1), expected, rtol=1e-5)
    assert {2.0, 20.0} < set(states.loss_scale.tolist()), "meta-test: it meets both"


def test_a_shorter_interval_than_the_tracker_grows_at_once():
    """PyTorch compares with ``==`` and would not grow before the next overflow."""
    state = ls.DynamicLossScale().init()._replace(growth_tracker=jnp.int32(1500))
    state = ls.DynamicLossScale(growth_interval=100).update(state, True)
    assert (float(state.loss_scale), int(state.growth_tracker)) == (2.0**16, 0)
