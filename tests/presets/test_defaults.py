"""What presets make of their arguments: defaults, kinds of rules, limits."""

import jax.numpy as jnp
import pytest

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126

# First scale, growth and backoff factor, interval, least and largest scale, hysteresis.
# A system without a limit has ours. Flax grows one step later than its interval says.
# Where the first scale is required, it is 8 here.
DEFAULTS = {
    presets.apex_amp: (2.0**16, 2, 1 / 2, 2000, SMALLEST, 2.0**24, 1),
    presets.deepspeed: (2.0**16, 2, 1 / 2, 1000, 1, LARGEST, 2),
    presets.deepspeed_fp16: (2.0**16, 2, 1 / 2, 1000, 1, LARGEST, 2),
    presets.fairseq: (2.0**15, 2, 1 / 2, 2000, 2.0**-13, LARGEST, 1),
    presets.flax_dynamic_scale: (2.0**16, 2, 1 / 2, 2001, SMALLEST, LARGEST, 1),
    presets.jmp_dynamic: (8, 2, 1 / 2, 2000, 1, LARGEST, 1),
    presets.keras_loss_scale: (2.0**15, 2, 1 / 2, 2000, SMALLEST, LARGEST, 1),
    presets.megatron: (2.0**32, 2, 1 / 2, 1000, 1, LARGEST, 2),
    presets.metaseq: (4, 2, 1 / 2, 256, 2.0**-5, LARGEST, 1),
    presets.mindspore_dynamic: (2.0**24, 2, 1 / 2, 2000, 1, LARGEST, 1),
    presets.mpx_dynamic: (8, 2, 1 / 2, 2000, 1, 65504, 1),
    presets.openseq2seq_backoff: (2.0**24, 2, 1 / 2, 2000, 1, 2.0**24, 1),
    presets.tf_contrib_exponential_update: (8, 2, 0.8, 100, 1, LARGEST, 2),
    presets.tf_dynamic_loss_scale: (2.0**15, 2, 1 / 2, 2000, 1, LARGEST, 1),
    presets.tf_keras_loss_scale: (2.0**15, 2, 1 / 2, 2000, 1, LARGEST, 1),
    presets.torch_grad_scaler: (2.0**16, 2, 1 / 2, 2000, SMALLEST, LARGEST, 1),
}
REQUIRED = {
    presets.jmp_dynamic: (jnp.int32(8),),
    presets.mpx_dynamic: (8.0,),
    presets.tf_contrib_exponential_update: (8.0, 100),
}


@pytest.mark.parametrize("preset", DEFAULTS, ids=lambda preset: preset.__name__)
def test_the_defaults_are_the_systems_own(preset):
    rule = preset(*REQUIRED.get(preset, ()))
    assert DEFAULTS[preset] == (
        *(rule.init_scale, rule.growth_factor, rule.backoff_factor),
        *(rule.growth_interval, rule.min_scale, rule.max_scale),
        getattr(rule, "hysteresis", 1),
    )


def test_the_defaults_of_logmax_are_its_own():
    rule = presets.openseq2seq_logmax()
    assert (rule.init_scale, rule.min_scale, rule.max_scale) == (1, 1, 2.0**24)
    assert (rule.beta1, rule.beta2, rule.overflow_std_dev) == (0.99, 0.999, 3.09)
    assert (rule.nonfinite_log, rule.power_of_two) == (2.0**16, False)


@pytest.mark.parametrize(
    ("rule", "scale", "skips"),
    [
        (presets.apex_amp(8.0), 8, False),
        (presets.deepspeed_fp16(enabled=False), 1, True),
        (presets.deepspeed_fp16(loss_scale=8.0), 8, True),
        (presets.jmp_static(8.0), 8, True),
        (presets.mindspore_fixed(), 128, True),
        (presets.mindspore_fixed(8.0, drop_overflow_update=False), 8, False),
        (presets.tf_contrib_fixed(8.0), 8, True),
        (presets.tf_fixed_loss_scale(8.0), 8, False),
        (presets.tf_keras_loss_scale(dynamic=False, initial_scale=8.0), 8, False),
        (presets.torch_grad_scaler(enabled=False), 1, False),
    ],
)
def test_a_scale_that_stays_is_a_fixed_rule(rule, scale, skips):
    assert rule == ls.FixedLossScale(scale, skip_nonfinite=skips)


@pytest.mark.parametrize(
    ("dynamic", "verbatim"),
    [
        (presets.tf_dynamic_loss_scale(1.0), presets.tf_dynamic_loss_scale(0.5)),
        (presets.mpx_dynamic(65504.0), presets.mpx_dynamic(65536.0)),
        (presets.apex_amp(max_loss_scale=2e99), presets.jmp_dynamic(jnp.float16(8))),
        (presets.deepspeed(first_growth_late=False), presets.deepspeed()),
        (presets.apex_amp(init_scale=2.0**30), presets.deepspeed_fp16()),
    ],
)
def test_a_rule_is_verbatim_only_if_a_dynamic_one_behaves_otherwise(dynamic, verbatim):
    assert type(dynamic) is ls.DynamicLossScale
    assert type(verbatim) is presets.VerbatimLossScale


def test_numbers_that_do_not_fit_are_refused_by_their_names():
    with pytest.raises(ValueError, match="^`min_loss_scaling` must not exceed `max_sc"):
        presets.mpx_dynamic(8.0, min_loss_scaling=65505.0)
    with pytest.raises(ValueError, match="^`dynamic_growth_steps` must be left out"):
        presets.tf_keras_loss_scale(False, 8.0, dynamic_growth_steps=3)
