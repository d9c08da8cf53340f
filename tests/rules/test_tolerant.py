"""TolerantLossScale against an oracle in plain Python."""

import numpy as np
import pytest
from helpers import run_rule

import optax_lossscale as ls


class Tolerant:
    """fairseq's and metaseq's rule, one Python statement each."""

    def __init__(self, rule):
        self.rule, self.scale, self.window = rule, rule.init_scale, rule.growth_interval
        self.step, self.last_overflow, self.last_change, self.overflows = 0, -1, -1, 0

    def __call__(self, grads_finite):
        rule = self.rule
        if grads_finite:
            if (self.step - self.last_overflow) % self.window == 0:
                self.scale = min(self.scale * rule.growth_factor, rule.max_scale)
                self.last_change = self.step
                if rule.interval_follows_scale:
                    self.window *= int(rule.growth_factor)
        else:
            self.last_overflow = self.step
            self.overflows += 1
            if self.overflows / (self.step - self.last_change) >= rule.tolerance:
                self.scale = max(self.scale * rule.backoff_factor, rule.min_scale)
                self.last_change, self.overflows = self.step, 0
                if rule.interval_follows_scale:
                    self.window = max(int(self.window / rule.growth_factor), 1)
        self.step += 1
        return self.scale


@pytest.mark.parametrize("options", [{}, {"interval_follows_scale": True}])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.4, 1.0])
def test_the_tolerant_rule_equals_its_oracle(options, tolerance):
    rule = ls.TolerantLossScale(
        growth_interval=3,
        tolerance=tolerance,
        min_scale=2.0**-5,
        **options,
    )
    overflow_share = np.repeat([0.05, 0.3, 0.7, 0.05], 125)
    flags = np.random.default_rng(0).random(500) >= overflow_share
    flags[:2] = True, False  # half of the first steps: the counters begin at 0
    scales = run_rule(rule, flags).loss_scale
    oracle = Tolerant(rule)
    np.testing.assert_array_equal(scales, [oracle(flag) for flag in flags])
    assert len(set(scales.tolist())) > 3, "meta-test: the scale moves"
