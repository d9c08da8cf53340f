"""Arguments of rules and presets: refused by the name that the user gave."""

import inspect
import math

import jax.numpy as jnp
import pytest

import optax_lossscale as ls
from optax_lossscale import presets

BAD = [
    (ls.HeadroomLossScale, "headroom", -1),
    (ls.HeadroomLossScale, "headroom", math.nan),
    (ls.HeadroomLossScale, "half_life", 0),
    (ls.HeadroomLossScale, "dtype", "int8"),
    (ls.HeadroomLossScale, "dtype", "half a float"),
    (ls.HeadroomLossScale, "dtype", None),
    (ls.HeadroomLossScale, "backoff_factor", 1.0),
    (ls.LogNormalLossScale, "beta1", 1.0),
    (ls.LogNormalLossScale, "beta2", 0),
    (ls.LogNormalLossScale, "log_max", math.inf),
    (ls.LogNormalLossScale, "overflow_std_dev", -1),
    (ls.LogNormalLossScale, "nonfinite_log", "16"),
    (ls.LogNormalLossScale, "power_of_two", 1),
    (ls.LogNormalLossScale, "init_scale", 1e-50),
    (ls.TolerantLossScale, "tolerance", 1.5),
    (ls.TolerantLossScale, "tolerance", True),
    (ls.TolerantLossScale, "interval_follows_scale", None),
    (presets.VerbatimLossScale, "first_growth_late", 1),
    (presets.VerbatimLossScale, "clips_every_step", "no"),
    (presets.VerbatimLossScale, "scale_dtype", "float64"),
    (presets.apex_amp, "scale_window", 0),
    (presets.apex_amp, "max_loss_scale", -1),
    (presets.apex_amp, "loss_scale", 0.5),
    (presets.deepspeed, "scale_factor", 1),
    (presets.deepspeed, "delayed_shift", 0),
    (presets.deepspeed, "consecutive_hysteresis", 1),
    (presets.deepspeed, "min_scale", None),
    (presets.deepspeed_fp16, "min_loss_scale", None),
    (presets.deepspeed_fp16, "initial_scale_power", 200),
    (presets.deepspeed_fp16, "initial_scale_power", "16"),
    (presets.deepspeed_fp16, "loss_scale_window", 0),
    (presets.deepspeed_fp16, "hysteresis", 0),
    (presets.fairseq, "scale_factor", 1.0),
    (presets.fairseq, "tolerance", -0.1),
    (presets.fairseq, "min_loss_scale", math.nan),
    (presets.fairseq, "min_loss_scale", None),
    (presets.fairseq, "scale_window", 0),
    (presets.flax_dynamic_scale, "scale", 0),
    (presets.flax_dynamic_scale, "growth_interval", 0),
    (presets.flax_dynamic_scale, "minimum_scale", -1),
    (presets.jmp_dynamic, "loss_scale", jnp.float32(0)),
    (presets.keras_loss_scale, "initial_scale", math.inf),
    (presets.keras_loss_scale, "dynamic_growth_steps", 1.5),
    (presets.megatron, "initial_scale", 0),
    (presets.megatron, "min_scale", None),
    (presets.metaseq, "min_loss_scale", -1),
    (presets.metaseq, "scale_factor", 2.0**31),
    (presets.mindspore_dynamic, "init_loss_scale", 0),
    (presets.mindspore_dynamic, "scale_factor", 0.5),
    (presets.mindspore_fixed, "drop_overflow_update", 1),
    (presets.mpx_dynamic, "loss_scaling", -1),
    (presets.openseq2seq_backoff, "scale_max", math.nan),
    (presets.openseq2seq_backoff, "scale_min", None),
    (presets.openseq2seq_logmax, "log_max", 17),
    (presets.tf_dynamic_loss_scale, "multiplier", 1),
    (presets.tf_dynamic_loss_scale, "increment_period", 0),
    (presets.tf_fixed_loss_scale, "loss_scale_value", 0.5),
    (presets.tf_keras_loss_scale, "dynamic", 128),
    (presets.tf_keras_loss_scale, "initial_scale", -1),
    (presets.torch_grad_scaler, "enabled", None),
    (presets.torch_grad_scaler, "backoff_factor", 1.5),
]


@pytest.mark.parametrize("factor", [1.5, 2.0**31, 2.0**100])
def test_an_interval_that_follows_the_scale_wants_a_whole_factor(factor):
    with pytest.raises(
        ValueError, match="^`growth_factor` must be a whole number up to 2147483647"
    ):
        ls.TolerantLossScale(growth_factor=factor, interval_follows_scale=True)
    with pytest.raises(ValueError, match="^`scale_factor` must be a whole number"):
        presets.metaseq(scale_factor=1.5)


def test_a_floor_above_the_ceiling_is_refused_by_both_names():
    with pytest.raises(ValueError, match="`min_loss_scale` must not exceed `max_loss"):
        presets.apex_amp(min_loss_scale=8.0, max_loss_scale=4.0)
    with pytest.raises(ValueError, match="`min_scale` must not exceed `max_scale`"):
        presets.VerbatimLossScale(min_scale=8.0, max_scale=4.0)


# Python's number is in range, and the one that devices compute with is not.
ROUNDED = [
    (ls.LogNormalLossScale, "beta1", 1 - 1e-9, 1.0),
    (ls.LogNormalLossScale, "beta2", 1 - 1e-9, 1.0),
    (ls.LogNormalLossScale, "beta1", 1e-50, 0.0),
    (ls.DynamicLossScale, "growth_factor", 1 + 1e-9, 1.0),
    (ls.DynamicLossScale, "backoff_factor", 1 - 1e-9, 1.0),
    (ls.HeadroomLossScale, "backoff_factor", 1e-50, 0.0),
    (ls.TolerantLossScale, "growth_factor", 1.00000001, 1.0),
    (presets.VerbatimLossScale, "backoff_factor", 0.99999999, 1.0),
    (presets.deepspeed, "scale_factor", 1 + 1e-9, 1.0),
    (presets.fairseq, "scale_factor", 1 + 1e-9, 1.0),
    (presets.openseq2seq_logmax, "beta2", 1 - 1e-9, 1.0),
    (presets.torch_grad_scaler, "growth_factor", 1 + 1e-9, 1.0),
]


@pytest.mark.parametrize(("make", "name", "value", "rounded"), ROUNDED)
def test_an_argument_is_refused_that_is_out_of_range_in_float32(
    make, name, value, rounded
):
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as error:
        make(**{name: value})
    assert f" got {value!r}, which is {rounded!r} in float32. It " in str(error.value)


def test_pythons_own_number_is_kept_and_counts_are_exact():
    rule = ls.DynamicLossScale(growth_factor=1.1, growth_interval=2**31 - 1)
    assert (rule.growth_factor, rule.growth_interval) == (1.1, 2**31 - 1)
    assert ls.LogNormalLossScale(beta2=1 - 1e-7).beta2 == 1 - 1e-7
    rule = ls.TolerantLossScale(growth_factor=2**31 - 1, interval_follows_scale=True)
    state = rule.update(rule.init(), True)
    assert int(state.rule_state.growth_interval) == rule.growth_interval == 2000


@pytest.mark.parametrize(("make", "name", "value"), BAD)
def test_a_bad_argument_is_refused_by_the_name_that_the_user_gave(make, name, value):
    required = {presets.jmp_dynamic, presets.mpx_dynamic, presets.tf_fixed_loss_scale}
    assert make not in required or name in inspect.signature(make).parameters
    with pytest.raises(ValueError, match=rf"^`{name}` must .*got ") as error:
        make(**{name: value})
    assert str(error.value).endswith("."), "a sentence with the way out"
