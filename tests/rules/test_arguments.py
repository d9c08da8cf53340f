"""Arguments of rules and presets: refused by the name that the user gave."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from every_rule import VARIANTS

import optax_lossscale as ls
from optax_lossscale import presets

NOT_NUMBERS = [math.nan, True, "8", None, 1j, [128.0]]
NOT_SCALES = [*NOT_NUMBERS, 0, -1.0, math.inf, 1e-39, 2.0**127, 10**400]
NOT_COUNTS = [*NOT_NUMBERS, 0, -1, 1.5, math.inf, 2**31]
NOT_SHARES = [*NOT_NUMBERS, 0, 1, 1.0, 2.0, -1]
NOT_FLAGS = [None, 1, 0, "no", np.bool_(True)]

BAD = {
    ls.FixedLossScale: {
        "loss_scale": [*NOT_SCALES, 0.5, 0.999],
        "skip_nonfinite": NOT_FLAGS,
    },
    ls.DynamicLossScale: {
        **dict.fromkeys(("init_scale", "min_scale", "max_scale"), NOT_SCALES),
        **dict.fromkeys(("growth_interval", "hysteresis"), NOT_COUNTS),
        "growth_factor": [*NOT_NUMBERS, 1, 1.0, 0.5, 2.0**127],
        "backoff_factor": NOT_SHARES,
        "hysteresis_refill": ["always", None, 1, True],
    },
    ls.HeadroomLossScale: {
        "headroom": [*NOT_NUMBERS, -1, 127],
        "half_life": NOT_COUNTS,
        "dtype": ["int8", "half a float", None],
        "backoff_factor": [1.0],
    },
    ls.LogNormalLossScale: {
        **dict.fromkeys(("beta1", "beta2"), NOT_SHARES),
        "log_max": [*NOT_NUMBERS, -127, 129, math.inf],
        "overflow_std_dev": [*NOT_NUMBERS, -1, 101],
        "nonfinite_log": [*NOT_NUMBERS, -127, 2.0**17],
        "power_of_two": NOT_FLAGS,
        "init_scale": [1e-50],
    },
    ls.TolerantLossScale: {
        "tolerance": [*NOT_NUMBERS, -0.1, 1.5],
        "interval_follows_scale": NOT_FLAGS,
    },
    presets.VerbatimLossScale: {
        **dict.fromkeys(("first_growth_late", "clips_every_step"), NOT_FLAGS),
        "scale_dtype": ["float64", None],
    },
    presets.apex_amp: {
        "scale_window": [0],
        "max_loss_scale": [-1],
        "loss_scale": [0.5],
    },
    presets.deepspeed: {
        "scale_factor": [1],
        "delayed_shift": [0],
        "consecutive_hysteresis": [1],
        "min_scale": [None],
    },
    presets.deepspeed_fp16: {
        "min_loss_scale": [None],
        "initial_scale_power": [200, "16"],
        "loss_scale_window": [0],
        "hysteresis": [0],
    },
    presets.fairseq: {
        "scale_factor": [1.0],
        "tolerance": [-0.1],
        "min_loss_scale": [math.nan, None],
        "scale_window": [0],
    },
    presets.flax_dynamic_scale: {
        "scale": [0],
        "growth_interval": [0],
        "minimum_scale": [-1],
    },
    presets.jmp_dynamic: {"loss_scale": [jnp.float32(0)]},
    presets.keras_loss_scale: {
        "initial_scale": [math.inf],
        "dynamic_growth_steps": [1.5],
    },
    presets.megatron: {"initial_scale": [0], "min_scale": [None]},
    presets.metaseq: {"min_loss_scale": [-1], "scale_factor": [2.0**31]},
    presets.mindspore_dynamic: {
        "init_loss_scale": [*NOT_SCALES, 0.5, 0.999],
        "scale_factor": [1, 0.5],
    },
    presets.mindspore_fixed: {"drop_overflow_update": [1]},
    presets.mpx_dynamic: {"loss_scaling": [-1]},
    presets.openseq2seq_backoff: {"scale_max": [math.nan], "scale_min": [None]},
    presets.openseq2seq_logmax: {"log_max": [17]},
    presets.tf_dynamic_loss_scale: {"multiplier": [1], "increment_period": [0]},
    presets.tf_fixed_loss_scale: {"loss_scale_value": [0.5]},
    presets.tf_keras_loss_scale: {"dynamic": [128], "initial_scale": [-1]},
    presets.torch_grad_scaler: {"enabled": [None], "backoff_factor": [1.5]},
}
# Python's number is in range, and the one that devices compute with is not.
ROUNDED = [
    *((ls.LogNormalLossScale, name, 1 - 1e-9, 1.0) for name in ("beta1", "beta2")),
    (ls.LogNormalLossScale, "beta1", 1e-50, 0.0),
    (ls.DynamicLossScale, "growth_factor", 1 + 1e-9, 1.0),
    (ls.DynamicLossScale, "backoff_factor", 1 - 1e-9, 1.0),
    (presets.deepspeed, "scale_factor", 1 + 1e-9, 1.0),
    (presets.openseq2seq_logmax, "beta2", 1 - 1e-9, 1.0),
]


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_argument_is_refused_with_its_name_its_value_and_a_way_out(make):
    for name, values in BAD[make].items():
        assert name in inspect.signature(make).parameters
        for value in values:
            with pytest.raises(ValueError, match=f"^`{name}` must .*got ") as error:
                make(**{name: value})
            message = str(error.value)
            assert repr(value) in message
            assert message.partition("got ")[2].endswith("."), "the way out"


@pytest.mark.parametrize(("make", "name", "value", "rounded"), ROUNDED)
def test_an_argument_is_refused_that_is_out_of_range_in_float32(
    make, name, value, rounded
):
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as error:
        make(**{name: value})
    assert f" got {value!r}, which is {rounded!r} in float32. It " in str(error.value)


@pytest.mark.parametrize("rule", VARIANTS.values(), ids=VARIANTS)
def test_a_traced_number_is_refused_and_another_rule_offered(rule):
    match = "must be a plain number, got a traced value.* continue with another one"
    for field in dataclasses.fields(rule):
        if type(getattr(rule, field.name)) not in (int, float):
            continue

        def build(x, name=field.name):
            return dataclasses.replace(rule, **{name: x}).init()

        with pytest.raises(ValueError, match=f"^`{field.name}` {match}"):
            jax.jit(build)(getattr(rule, field.name))


@pytest.mark.parametrize(
    "number",
    [128, np.float32(128), np.int64(128), np.asarray(128.0), ml_dtypes.bfloat16(128)]
    + [jnp.float32(128), jnp.int32(128)],
    ids=lambda x: type(x).__name__,
)
def test_any_kind_of_number_becomes_pythons_own(number):
    fixed, dynamic = ls.FixedLossScale(number), ls.DynamicLossScale(number)
    assert fixed == ls.FixedLossScale() and hash(fixed) == hash(ls.FixedLossScale())
    counting = ls.DynamicLossScale(growth_interval=number)
    kinds = (fixed.loss_scale, dynamic.init_scale, counting.growth_interval)
    assert list(map(type, kinds)) == [float, float, int]


def test_counts_are_exact_and_numbers_are_not_rounded():
    rule = ls.DynamicLossScale(growth_factor=1.1, growth_interval=2**31 - 1)
    assert (rule.growth_factor, rule.growth_interval) == (1.1, 2**31 - 1)
    assert ls.LogNormalLossScale(beta2=1 - 1e-7).beta2 == 1 - 1e-7


def test_the_first_scale_may_be_positional_and_nothing_else():
    for make in {type(rule) for rule in VARIANTS.values()} - {ls.FixedLossScale}:
        assert make(64.0) == make(init_scale=64.0)
        with pytest.raises(TypeError):
            make(64.0, 2.0)
    assert ls.FixedLossScale(64.0) == ls.FixedLossScale(loss_scale=64.0)


ORDERED = [
    (ls.DynamicLossScale, "min_scale", "init_scale"),
    (ls.DynamicLossScale, "init_scale", "max_scale"),
    (ls.TolerantLossScale, "min_scale", "init_scale"),
    (ls.HeadroomLossScale, "init_scale", "max_scale"),
    (ls.LogNormalLossScale, "init_scale", "max_scale"),
    (presets.VerbatimLossScale, "min_scale", "max_scale"),
    (presets.apex_amp, "min_loss_scale", "max_loss_scale"),
    (presets.fairseq, "threshold", "init_scale"),
    (presets.megatron, "min_scale", "initial_scale"),
    (presets.openseq2seq_backoff, "scale_min", "scale_max"),
    (presets.openseq2seq_logmax, "scale_min", "scale_max"),
]


@pytest.mark.parametrize(("make", "lower", "upper"), ORDERED)
def test_limits_out_of_order_are_refused_by_both_names(make, lower, upper):
    match = f"^`{lower}` must not exceed `{upper}`.* Lower `{lower}` or raise `{upper}"
    with pytest.raises(ValueError, match=match):
        make(**{lower: 8.0, upper: 4.0})
    make(**{lower: 8.0, upper: 8.0})


@pytest.mark.parametrize("factor", [1.5, 2.0**31, 2.0**100])
def test_an_interval_that_follows_the_scale_needs_a_whole_factor(factor):
    match = "^`growth_factor` must be a whole number from 2 to 2147483647"
    with pytest.raises(ValueError, match=match):
        ls.TolerantLossScale(growth_factor=factor, interval_follows_scale=True)
    with pytest.raises(ValueError, match="^`scale_factor` must be a whole number"):
        presets.metaseq(scale_factor=1.5)
