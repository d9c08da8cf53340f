"""DynamicLossScale against an oracle in plain Python."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from helpers import run_rule
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_lossscale as ls
from optax_lossscale import _precision


@dataclasses.dataclass
class Oracle:
    """The rule as its documentation states it, one Python statement each."""

    rule: ls.DynamicLossScale
    scale: np.float32
    growth: int = 0
    hysteresis: int = 0

    def step(self, grads_finite):
        rule, f32 = self.rule, np.float32
        changed = False
        with np.errstate(all="ignore"):
            if grads_finite:
                self.growth += 1
                if self.growth >= rule.growth_interval:
                    grown = self.scale * f32(rule.growth_factor)
                    self.scale = min(grown, f32(rule.max_scale))
                    self.growth, changed = 0, True
            else:
                self.growth = 0
                self.hysteresis = max(self.hysteresis - 1, 0)
                if self.hysteresis == 0:
                    backed_off = self.scale * f32(rule.backoff_factor)
                    self.scale = max(backed_off, f32(rule.min_scale))
                    changed = True
        refill = {
            "finite": grads_finite,
            "growth": grads_finite and changed,
            "change": changed,
        }
        if refill[rule.hysteresis_refill]:
            self.hysteresis = rule.hysteresis


@st.composite
def rules(draw):
    octaves = st.integers(-126, 126).map(lambda x: 2.0**x)
    scales = octaves | st.floats(2.0**-30, 2.0**30, width=32)
    low, init, high = sorted(draw(scales) for _ in range(3))
    return ls.DynamicLossScale(
        init_scale=init,
        min_scale=low,
        max_scale=high,
        growth_factor=draw(st.floats(1.125, 16, width=32)),
        backoff_factor=draw(st.floats(0.0625, 0.875, width=32)),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_refill=draw(st.sampled_from(["finite", "growth", "change"])),
    )


flags = st.lists(st.booleans(), min_size=1, max_size=24)


@given(rules(), flags)
@settings(max_examples=25)  # each rule is a program of its own
def test_the_rule_equals_the_oracle_on_any_run(rule, run):
    states = run_rule(rule, run)
    oracle = Oracle(rule, np.float32(rule.init_scale), 0, rule.hysteresis)
    for i, grads_finite in enumerate(run):
        oracle.step(grads_finite)
        assert states.loss_scale[i] == oracle.scale
        assert states.growth_tracker[i] == oracle.growth
        assert states.hysteresis_tracker[i] == oracle.hysteresis
    assert states.skipped_steps[-1] == run.count(False)


def test_a_shorter_interval_than_the_tracker_grows_at_once():
    """PyTorch compares with ``==`` and would not grow before the next overflow."""
    state = ls.DynamicLossScale().init()._replace(growth_tracker=jnp.int32(1500))
    state = ls.DynamicLossScale(growth_interval=100).update(state, True)
    assert (float(state.loss_scale), int(state.growth_tracker)) == (2.0**16, 0)


def test_powers_of_two_are_exact():
    exponents = np.arange(-126, 127)
    powers = _precision.power_of_two(jnp.asarray(exponents, jnp.float32))
    np.testing.assert_array_equal(powers, 2.0**exponents)
    powers = _precision.exact_power(jnp.asarray(exponents))
    np.testing.assert_array_equal(powers, 2.0**exponents)
