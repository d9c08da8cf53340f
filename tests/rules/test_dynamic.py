"""DynamicLossScale against the statements of its documentation."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_rules import Simulated
from training import run_rule

import optax_lossscale as ls


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
    states, simulated = run_rule(rule, flags), Simulated(rule)
    for step, finite in enumerate(flags):
        simulated.update(finite)
        simulated.assert_is(jax.tree.map(operator.itemgetter(step), states))
    assert {2.0, 20.0} < set(states.loss_scale.tolist()), "meta-test: it meets both"


def test_a_shorter_interval_than_the_tracker_grows_at_once():
    """PyTorch compares with ``==`` and would not grow before the next overflow."""
    state = ls.DynamicLossScale().init()._replace(growth_tracker=jnp.int32(1500))
    state = ls.DynamicLossScale(growth_interval=100).update(state, True)
    assert (float(state.loss_scale), int(state.growth_tracker)) == (2.0**16, 0)
