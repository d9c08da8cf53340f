"""Arguments of rules and presets: refused by the name that the user gave."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from every_rule import DEFAULTS

import optax_lossscale as ls
from optax_lossscale import presets

RULES = [type(rule) for rule in DEFAULTS.values()]
NOT_SCALES, NOT_COUNTS = [math.nan, 0, 2.0**-127, 2.0**127], [True, 0, 1.5, 2**31]
# The last two are 0 and 1 in float32, in which rules compute.
NOT_SHARES = ["0.5", 0, 1, 1e-50, 1 - 1e-9]
NOT_FLAGS = [None, 1, np.bool_(True)]

BAD = {
    ls.FixedLossScale: {
        "loss_scale": [None, 1j, [128.0], 0.999, 2.0**127],
        "skip_nonfinite": NOT_FLAGS,
    },
    ls.DynamicLossScale: {
        **dict.fromkeys(("init_scale", "min_scale", "max_scale"), NOT_SCALES),
        **dict.fromkeys(("growth_interval", "hysteresis"), NOT_COUNTS),
        "growth_factor": [1, 1 + 1e-9, math.inf],
        "backoff_factor": NOT_SHARES,
        "hysteresis_refill": ["always", True],
    },
    ls.HeadroomLossScale: {
        "headroom": [-0.1, 126.1],
        "half_life": NOT_COUNTS,
        "dtype": ["int8", "half a float", None],
    },
    presets.keras_loss_scale: {"dynamic": [False]},
    presets.tf_keras_loss_scale: {"dynamic": [128]},
    presets.torch_grad_scaler: {"enabled": [None], "backoff_factor": [1.5]},
    presets.deepspeed_fp16: {"enabled": ["auto"], "loss_scale": [None, "", -1]},
}
# Presets refuse what the rule refuses, by the rule's names.
BAD_PRESETS = [
    (presets.apex_amp, "max_loss_scale", -1, "init_scale"),
    (presets.apex_amp, "scale_window", 0, "growth_interval"),
    (presets.fairseq, "min_loss_scale", math.nan, "min_scale"),
    (presets.flax_dynamic_scale, "minimum_scale", -1, "min_scale"),
    (presets.jmp_dynamic, "loss_scale", 0, "init_scale"),
    (presets.mindspore_dynamic, "init_loss_scale", 0.5, "min_scale"),
    (presets.tf_dynamic_loss_scale, "multiplier", 1, "growth_factor"),
]


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_argument_is_refused_with_its_name_and_its_value(make):
    for name, values in BAD[make].items():
        for value in values:
            with pytest.raises(ValueError, match=f"^`{name}` must .*got ") as error:
                make(**{name: value})
            assert repr(value) in str(error.value)


@pytest.mark.parametrize(("preset", "name", "value", "field"), BAD_PRESETS)
def test_a_preset_refuses_what_its_rule_refuses(preset, name, value, field):
    with pytest.raises(ValueError, match=f"^`{field}` must .*got .*{value}"):
        preset(**{name: value})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_traced_number_is_refused_and_another_rule_offered(rule):
    match = "must be a plain number, got a traced value.* continue with another one"
    for name, value in rule().get_config().items():
        if type(value) in (int, float):
            with pytest.raises(ValueError, match=f"^`{name}` {match}"):
                jax.jit(lambda x, name=name: rule(**{name: x}).init())(value)


@pytest.mark.parametrize(
    "number", [128, np.float32(128), np.asarray(128.0), ml_dtypes.bfloat16(128)]
)
def test_any_kind_of_number_becomes_pythons_own(number):
    for x in (number, jnp.asarray(number)):
        fixed, counting = ls.FixedLossScale(x), ls.DynamicLossScale(growth_interval=x)
        assert fixed == ls.FixedLossScale() and hash(fixed) == hash(ls.FixedLossScale())
        kinds = type(fixed.loss_scale), type(counting.growth_interval)
        assert kinds == (float, int)


def test_the_first_scale_may_be_positional_and_nothing_else():
    for make in RULES:
        assert make(64.0).init().loss_scale == 64.0
        if make is not ls.FixedLossScale:
            with pytest.raises(TypeError):
                make(64.0, 2.0)


@pytest.mark.parametrize(
    ("rule", "upper"),
    [
        (ls.DynamicLossScale, "init_scale"),
        (ls.HeadroomLossScale, "init_scale"),
    ],
)
def test_limits_out_of_order_are_refused_by_both_names(rule, upper):
    with pytest.raises(ValueError, match=f"^`min_scale` must not exceed `{upper}`"):
        rule(**{"min_scale": 8.0, upper: 4.0})
    rule(**{"min_scale": 8.0, upper: 8.0})
