"""LogNormalLossScale against an oracle in float64."""

import math

import jax
import numpy as np
import pytest
from helpers import run_rule

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def log_max(magnitudes, finite, nonfinite_log, log_max=16.0):
    """The log-normal rule in float64, averages as sums."""
    x = np.where(finite, np.log2(magnitudes), nonfinite_log)
    for steps in range(1, len(x) + 1):
        age = np.arange(steps)[::-1]
        fast, slow = 0.99**age, 0.999**age
        mean = np.average(x[:steps], weights=fast)
        slow_mean = np.average(x[:steps], weights=slow)
        variance = np.average((x[:steps] - slow_mean) ** 2, weights=slow)
        yield 2 ** (log_max - mean - 3.09 * math.sqrt(variance))


@pytest.mark.parametrize("overflow", [None, 90])
def test_the_log_normal_rule_equals_its_oracle(overflow):
    rng = np.random.default_rng(0)
    magnitudes = np.exp2(rng.normal(-5, 2, 120)).astype(np.float32)
    finite = np.arange(120) != overflow
    rule = presets.openseq2seq_logmax(scale_min=0.0, scale_max=math.inf)
    scales = run_rule(rule, finite, magnitudes).loss_scale
    expected = np.clip(list(log_max(magnitudes, finite, 2.0**16)), SMALLEST, LARGEST)
    # The variance is a difference in float32.
    np.testing.assert_allclose(scales[10:], expected[10:], rtol=1e-2)


def test_the_log_normal_scale_is_rounded_down_to_a_power_of_two():
    rule = ls.LogNormalLossScale()
    exact = presets.openseq2seq_logmax()
    finite, magnitudes = [True] * 4, [0.3, 0.7, 0.1, 0.4]
    rounded, scales = (
        run_rule(x, finite, magnitudes).loss_scale for x in (rule, exact)
    )
    np.testing.assert_array_equal(rounded, 2.0 ** np.floor(np.log2(scales)))


def test_all_zero_gradients_leave_the_log_normal_rule_alone():
    """In OpenSeq2Seq the scale is NaN from the first one on."""
    rule = ls.LogNormalLossScale()
    state = rule.update(rule.init(), True, 0.5)
    again = rule.update(state, True, 0.0)
    assert float(again.loss_scale) == float(state.loss_scale) != rule.init_scale
    assert again.rule_state == state.rule_state


def test_one_overflow_does_not_paralyze_the_log_normal_rule():
    """OpenSeq2Seq counts it as 2**65536 and stays at its floor."""
    flags, magnitudes = np.arange(400) != 100, [2.0**-10] * 400
    after = {
        rule.power_of_two: run_rule(rule, flags, magnitudes).loss_scale[-1]
        for rule in (ls.LogNormalLossScale(), presets.openseq2seq_logmax())
    }
    assert after[False] == 1.0 and 2.0**21 <= after[True] <= 2.0**23


def test_an_overflow_at_the_second_step_costs_a_thousand():
    """The figures of the page on rules."""
    rule = ls.LogNormalLossScale()

    def step(state, grads_finite):
        state = rule.update(state, grads_finite, 2.0**-10)
        return state, state.loss_scale

    _, scales = jax.lax.scan(step, rule.init(), np.arange(1, 1000) != 2)
    assert scales[0] == 2.0**24 and scales[1] == 1.0
    after = scales[2:]
    assert int(np.argmax(after >= 2.0**12)) + 1 == 33
    assert 900 < int(np.argmax(after >= 2.0**24)) < 1000
