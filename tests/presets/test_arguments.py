"""What presets make of their arguments, where no recording shows it."""

import math

import pytest
from every_rule import PRESETS

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def fixed(scale, skips):
    return ls.FixedLossScale(scale, skip_nonfinite=skips)


def dynamic(first, interval, least=SMALLEST, largest=LARGEST, **others):
    limits = {"min_scale": least, "max_scale": largest}
    return ls.DynamicLossScale(first, growth_interval=interval, **limits, **others)


BOTH = {"hysteresis_refill": "growth", "hysteresis": 2}
SLOW = {"hysteresis_refill": "change", "hysteresis": 2, "backoff_factor": 0.8}

CONTRIB = {"init_loss_scale": 8.0, "incr_every_n_steps": 100}
# The rule of the defaults of each preset.
P = presets
TABLE = [
    (P.apex_amp, {}, dynamic(2.0**16, 2000, largest=2.0**24)),
    (P.deepspeed, {}, dynamic(2.0**16, 1000, 1.0, **BOTH)),
    (P.deepspeed_fp16, {}, dynamic(2.0**16, 1000, 1.0, **BOTH)),
    (P.fairseq, {}, dynamic(2.0**15, 2000, 2.0**-13)),
    # It grows one step later than documented.
    (P.flax_dynamic_scale, {}, dynamic(2.0**16, 2001)),
    (P.jmp_dynamic, {"loss_scale": 8.0}, dynamic(8.0, 2000, 1.0)),
    (P.keras_loss_scale, {}, dynamic(2.0**15, 2000)),
    (P.megatron, {}, dynamic(2.0**32, 1000, 1.0, **BOTH)),
    (P.mindspore_dynamic, {}, dynamic(2.0**24, 2000, 1.0)),
    (P.mpx_dynamic, {"loss_scaling": 8.0}, dynamic(8.0, 2000, 1.0, 65504.0)),
    (P.tf_contrib_exponential_update, CONTRIB, dynamic(8.0, 100, 1.0, **SLOW)),
    (P.tf_dynamic_loss_scale, {}, dynamic(2.0**15, 2000, 1.0)),
    (P.tf_keras_loss_scale, {}, dynamic(2.0**15, 2000, 1.0)),
    (P.torch_grad_scaler, {}, dynamic(2.0**16, 2000)),
]
assert {preset.__name__ for preset, _, _ in TABLE} == PRESETS.keys()
# And of arguments that no recorded run has.
TABLE += [
    (P.apex_amp, {"loss_scale": 8.0}, fixed(8.0, False)),
    (P.apex_amp, {"init_scale": 2.0**30}, dynamic(2.0**24, 2000, largest=2.0**24)),
    (P.deepspeed_fp16, {"enabled": False}, fixed(1.0, True)),
    (P.deepspeed_fp16, {"loss_scale": 8.0}, fixed(8.0, True)),
    (
        P.deepspeed_fp16,
        dict(initial_scale_power=12, loss_scale_window=5, hysteresis=3)
        | dict(consecutive_hysteresis=True, min_loss_scale=4.0)
        | dict(auto_cast=True, fp16_master_weights_and_grads=True),
        dynamic(2.0**12, 5, 4.0, hysteresis=3),
    ),
    (
        P.fairseq,  # the scale stays above the minimum, also if that is the threshold
        dict(init_scale=8.0, scale_factor=4.0, scale_window=5)
        | dict(min_loss_scale=2.0**-5, threshold=2.0**-5),
        dynamic(8.0, 5, 2.0**-3, growth_factor=4.0, backoff_factor=0.25),
    ),
    (P.fairseq, {"threshold": 3.0}, dynamic(2.0**15, 2000, 3.0)),
    (P.flax_dynamic_scale, {"minimum_scale": None}, dynamic(2.0**16, 2001)),
    (P.tf_keras_loss_scale, dict(dynamic=False, initial_scale=8.0), fixed(8.0, False)),
    (P.torch_grad_scaler, {"enabled": False}, fixed(1.0, False)),
]


@pytest.mark.parametrize(("preset", "given", "rule"), TABLE)
def test_preset_makes_a_rule_of_its_arguments(preset, given, rule):
    assert preset(**given) == rule


KERAS_2 = {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": 3}
MPX = {"loss_scaling": 8.0, "min_loss_scaling": 16.0}
FAIRSEQ = {"init_scale": 4.0, "threshold": 8.0}
# Arguments, and the name in the error: a rule has its own.
REFUSED = [
    (P.keras_loss_scale, {"dynamic": False}, "dynamic` must .*got False"),
    (P.tf_keras_loss_scale, {"dynamic": 128}, "dynamic` must .*got 128"),
    (P.torch_grad_scaler, {"enabled": None}, "enabled` must .*got None"),
    (P.deepspeed_fp16, {"enabled": "auto"}, "enabled` must .*got 'auto'"),
    (P.deepspeed_fp16, {"loss_scale": None}, "loss_scale` must .*got None"),
    (P.deepspeed_fp16, {"loss_scale": -1}, "loss_scale` must .*got -1"),
    (P.apex_amp, {"max_loss_scale": -1}, "init_scale` must .*got .*-1"),
    (P.apex_amp, {"scale_window": 0}, "growth_interval` must .*got .*0"),
    (P.fairseq, {"min_loss_scale": math.nan}, "min_scale` must .*got .*nan"),
    (P.flax_dynamic_scale, {"minimum_scale": -1}, "min_scale` must .*got .*-1"),
    (P.mindspore_dynamic, {"init_loss_scale": 0.5}, "min_scale` must .*got .*0.5"),
    (P.tf_dynamic_loss_scale, {"multiplier": 1}, "growth_factor` must .*got .*1"),
    # Those that do not go together.
    (P.tf_keras_loss_scale, KERAS_2, "dynamic_growth_steps` must be left out"),
    (P.mpx_dynamic, MPX, "min_scale` must not exceed `init_scale"),
    (P.fairseq, {"init_scale": 0.0}, "init_scale` must be a number from"),
    (P.fairseq, FAIRSEQ, "min_scale` must not exceed `init_scale"),
]


@pytest.mark.parametrize(("preset", "given", "words"), REFUSED)
def test_preset_refuses_what_its_rule_refuses(preset, given, words):
    with pytest.raises(ValueError, match=f"^`{words}"):
        preset(**given)
