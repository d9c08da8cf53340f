"""What presets make of their arguments, where no recording shows it."""

import pytest
from every_rule import PRESETS

import optax_lossscale as ls
from optax_lossscale import presets as P

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def fixed(scale, skips):
    return ls.FixedLossScale(scale, skip_nonfinite=skips)


def dynamic(first, interval, least=SMALLEST, largest=LARGEST, **others):
    limits = {"min_scale": least, "max_scale": largest}
    return ls.DynamicLossScale(first, growth_interval=interval, **limits, **others)


BOTH = {"hysteresis_refill": "growth", "hysteresis": 2}
SLOW = {"hysteresis_refill": "change", "hysteresis": 2, "backoff_factor": 0.8}
# Of presets whose first scale has no default, it is 8.
DEFAULTS = {
    "apex_amp": dynamic(2.0**16, 2000, largest=2.0**24),
    "deepspeed": dynamic(2.0**16, 1000, 1.0, **BOTH),
    "deepspeed_fp16": dynamic(2.0**16, 1000, 1.0, **BOTH),
    "fairseq": dynamic(2.0**15, 2000, 2.0**-13),
    "flax_dynamic_scale": dynamic(2.0**16, 2001),  # a step later than documented
    "jmp_dynamic": dynamic(8.0, 2000, 1.0),
    "keras_loss_scale": dynamic(2.0**15, 2000),
    "megatron": dynamic(2.0**32, 1000, 1.0, **BOTH),
    "mindspore_dynamic": dynamic(2.0**24, 2000, 1.0),
    "mpx_dynamic": dynamic(8.0, 2000, 1.0, 65504.0),
    "tf_contrib_exponential_update": dynamic(8.0, 100, 1.0, **SLOW),
    "tf_dynamic_loss_scale": dynamic(2.0**15, 2000, 1.0),
    "tf_keras_loss_scale": dynamic(2.0**15, 2000, 1.0),
    "torch_grad_scaler": dynamic(2.0**16, 2000),
}


@pytest.mark.parametrize("name", P.__all__)
def test_preset_has_the_defaults_of_its_system(name):
    assert PRESETS[name] == DEFAULTS[name]


DEEPSPEED = {"initial_scale_power": 12, "loss_scale_window": 5, "hysteresis": 3}
DEEPSPEED |= {"consecutive_hysteresis": True, "min_loss_scale": 4.0, "auto_cast": True}
DEEPSPEED |= {"fp16_master_weights_and_grads": True}
# The scale stays above the minimum, also if that is the threshold.
FAIRSEQ = {"init_scale": 8.0, "scale_factor": 4.0, "scale_window": 5}
FAIRSEQ |= {"min_loss_scale": 2.0**-5, "threshold": 2.0**-5}
BY_4 = {"growth_factor": 4.0, "backoff_factor": 0.25}
# The rules of arguments that no recorded run has.
TABLE = [
    (P.apex_amp, {"loss_scale": 8.0}, fixed(8.0, False)),
    (P.apex_amp, {"init_scale": 2.0**30}, dynamic(2.0**24, 2000, largest=2.0**24)),
    (P.deepspeed_fp16, {"enabled": False}, fixed(1.0, True)),
    (P.deepspeed_fp16, {"loss_scale": 8.0}, fixed(8.0, True)),
    (P.deepspeed_fp16, DEEPSPEED, dynamic(2.0**12, 5, 4.0, hysteresis=3)),
    (P.deepspeed_fp16, {"min_loss_scale": None}, dynamic(2.0**16, 1000, **BOTH)),
    (P.deepspeed_fp16, {"min_loss_scale": 0}, dynamic(2.0**16, 1000, **BOTH)),
    (P.fairseq, FAIRSEQ, dynamic(8.0, 5, 2.0**-3, **BY_4)),
    (P.fairseq, {"threshold": 3.0}, dynamic(2.0**15, 2000, 3.0)),
    (P.flax_dynamic_scale, {"minimum_scale": None}, dynamic(2.0**16, 2001)),
    (
        P.tf_keras_loss_scale,
        {"dynamic": False, "initial_scale": 8.0},
        fixed(8.0, False),
    ),
    (P.torch_grad_scaler, {"enabled": False}, fixed(1.0, False)),
]


def words_of(x):
    """The id of a preset, of its arguments, or of what they make."""
    return x.__name__ if callable(x) else str(x)[:40]


@pytest.mark.parametrize(("preset", "given", "rule"), TABLE, ids=words_of)
def test_preset_makes_a_rule_of_its_arguments(preset, given, rule):
    assert preset(**given) == rule


KERAS_2 = {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": 3}
MPX = {"loss_scaling": 8.0, "min_loss_scaling": 16.0}
HIGH = {"init_scale": 4.0, "threshold": 8.0}
# The error names the argument as its system does.
REFUSED = [
    (P.keras_loss_scale, {"dynamic": False}, "dynamic` must .*got False"),
    (P.torch_grad_scaler, {"init_scale": (4.0, "scale")}, r"init_scale` .*got \(4.0"),
    (P.tf_keras_loss_scale, {"dynamic": 128}, "dynamic` must .*got 128"),
    (P.torch_grad_scaler, {"enabled": None}, "enabled` must .*got None"),
    (P.deepspeed_fp16, {"enabled": "auto"}, "enabled` must .*got 'auto'"),
    (P.deepspeed_fp16, {"loss_scale": -1}, "loss_scale` must .*got -1"),
    (P.deepspeed_fp16, {"min_loss_scale": False}, "min_loss_scale` .*got False"),
    (P.deepspeed_fp16, {"initial_scale_power": 1e3}, "initial_scale_power` .*1000"),
    (P.deepspeed_fp16, {"initial_scale_power": -127}, "initial_scale_power` .*-127"),
    (P.deepspeed, {"consecutive_hysteresis": 1}, "consecutive_hysteresis` must .*1"),
    (P.apex_amp, {"max_loss_scale": -1}, "max_loss_scale` must .*got -1"),
    (P.fairseq, {"threshold": 0}, "threshold` must .*got 0"),
    (P.flax_dynamic_scale, {"growth_interval": "1"}, "growth_interval` must .*'1'"),
    (P.mindspore_dynamic, {"init_loss_scale": 0.5}, "init_loss_scale` .*from 1 to"),
    (P.tf_dynamic_loss_scale, {"multiplier": 1}, "multiplier` must .*got 1"),
    # Those that do not go together.
    (P.tf_keras_loss_scale, KERAS_2, "dynamic_growth_steps` must be left out"),
    (P.mpx_dynamic, MPX, "loss_scaling` must be a number from 16 to"),
    (P.fairseq, HIGH, "init_scale` must be a number from 8 to"),
]


@pytest.mark.parametrize(("preset", "given", "words"), REFUSED, ids=words_of)
def test_error_names_the_argument_as_its_system_does(preset, given, words):
    with pytest.raises(ValueError, match=f"^`{words}"):
        preset(**given)


def test_all_arguments_but_the_first_are_keyword_only():
    """The other systems have other orders, and fairseq's fourth is its tolerance."""
    for name in P.__all__:
        with pytest.raises(TypeError, match="positional argument"):
            getattr(P, name)(8.0, 2.0)
