"""The defaults of every preset are those of the system that it is named after."""

import pytest

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126

# First scale, growth and backoff factor, interval, least and largest scale. A system
# without a limit has ours. Flax grows one step later than its interval says.
DEFAULTS = {
    presets.apex_amp: (2.0**16, 2, 1 / 2, 2000, SMALLEST, 2.0**24),
    presets.deepspeed: (2.0**16, 2, 1 / 2, 1000, 1, LARGEST),
    presets.deepspeed_fp16: (2.0**16, 2, 1 / 2, 1000, 1, LARGEST),
    presets.fairseq: (2.0**15, 2, 1 / 2, 2000, 2.0**-13, LARGEST),
    presets.flax_dynamic_scale: (2.0**16, 2, 1 / 2, 2001, SMALLEST, LARGEST),
    presets.keras_loss_scale: (2.0**15, 2, 1 / 2, 2000, SMALLEST, LARGEST),
    presets.megatron: (2.0**32, 2, 1 / 2, 1000, 1, LARGEST),
    presets.metaseq: (4, 2, 1 / 2, 256, 2.0**-5, LARGEST),
    presets.mindspore_dynamic: (2.0**24, 2, 1 / 2, 2000, 1, LARGEST),
    presets.openseq2seq_backoff: (2.0**24, 2, 1 / 2, 2000, 1, 2.0**24),
    presets.tf_dynamic_loss_scale: (2.0**15, 2, 1 / 2, 2000, 1, LARGEST),
    presets.tf_keras_loss_scale: (2.0**15, 2, 1 / 2, 2000, 1, LARGEST),
    presets.torch_grad_scaler: (2.0**16, 2, 1 / 2, 2000, SMALLEST, LARGEST),
}


@pytest.mark.parametrize("preset", DEFAULTS, ids=lambda preset: preset.__name__)
def test_the_defaults_are_the_systems_own(preset):
    rule = preset()
    assert DEFAULTS[preset] == (
        *(rule.init_scale, rule.growth_factor, rule.backoff_factor),
        *(rule.growth_interval, rule.min_scale, rule.max_scale),
    )
    hysteresis = 2 if preset.__name__.startswith(("deepspeed", "megatron")) else 1
    assert getattr(rule, "hysteresis", 1) == hysteresis


def test_the_defaults_where_the_scale_itself_is_required():
    for rule in (presets.jmp_dynamic(8.0), presets.mpx_dynamic(8.0)):
        assert (rule.growth_factor, rule.backoff_factor) == (2, 1 / 2)
        assert (rule.growth_interval, rule.min_scale) == (2000, 1)
    rule = presets.tf_contrib_exponential_update(8.0, 100)
    assert (rule.hysteresis, rule.growth_factor, rule.backoff_factor) == (2, 2, 0.8)


def test_a_scale_that_stays_is_a_fixed_rule():
    assert presets.deepspeed_fp16(enabled=False) == ls.FixedLossScale(1.0)
    assert presets.deepspeed_fp16(loss_scale=128.0) == ls.FixedLossScale(128.0)
    rule = presets.tf_keras_loss_scale(dynamic=False, initial_scale=8.0)
    assert rule == ls.FixedLossScale(8.0, skip_nonfinite=False)
    with pytest.raises(ValueError, match="`dynamic_growth_steps` must be left out"):
        presets.tf_keras_loss_scale(False, 8.0, dynamic_growth_steps=3)
