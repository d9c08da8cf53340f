"""The rules against the statements of their documentation."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_holds
from simulated_rules import Simulated
from training import run_rule

import optax_lossscale as ls

FACTORS = {"growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 3}
LIMITS = {"min_scale": 2.0, "max_scale": 20.0}
RULES = [
    ls.FixedLossScale(3.0),
    *(
        ls.DynamicLossScale(8.0, hysteresis=2, hysteresis_refill=x, **FACTORS, **LIMITS)
        for x in ("finite", "growth", "change")
    ),
    *(
        ls.HeadroomLossScale(half_life=x, headroom=4, max_scale=2.0**40)
        for x in (1, 30)
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_does_as_documented(rule):
    rng = np.random.default_rng(0)
    flags = rng.random(250) > np.repeat([0.1, 0.6], 125)
    magnitudes = 2.0 ** rng.uniform(-30, -5, 250)
    magnitudes[100:200] /= 2.0**10
    states, simulated = run_rule(rule, flags, magnitudes), Simulated(rule)
    for step, (finite, largest) in enumerate(zip(flags, magnitudes, strict=True)):
        simulated.update(finite, np.float32(largest))
        state = jax.tree.map(operator.itemgetter(step), states)
        assert_holds(lambda x=state: simulated.assert_is(x) is None, f"step {step}")
    if isinstance(rule, ls.DynamicLossScale):
        assert {*LIMITS.values()} < {*states.loss_scale.tolist()}, "it meets both"


def test_shorter_interval_than_the_tracker_grows_at_once():
    """PyTorch compares with ``==`` and would not grow before the next overflow."""
    state = ls.DynamicLossScale().init()._replace(growth_tracker=jnp.int32(1500))
    state = ls.DynamicLossScale(growth_interval=100).update(state, True)
    assert (float(state.loss_scale), int(state.growth_tracker)) == (2.0**16, 0)
