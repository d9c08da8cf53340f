"""What presets make of their arguments: one table of all presets and arguments."""

import inspect

import jax.numpy as jnp
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


def verbatim(first, interval, least=SMALLEST, largest=LARGEST, **others):
    numbers = dict(growth_interval=interval, min_scale=least, max_scale=largest)
    return presets.VerbatimLossScale(init_scale=first, **numbers, **others)


BY_FOUR = {"growth_factor": 4.0, "backoff_factor": 0.25}
LATE = {"hysteresis_refill": "growth", "first_growth_late": True}
BOTH = {"hysteresis_refill": "growth", "hysteresis": 2}

# The rule of the defaults of each preset, and of other values for each argument.
P = presets
TABLE = [
    (P.apex_amp, {}, dynamic(2.0**16, 2000, largest=2.0**24)),
    (P.apex_amp, {"loss_scale": 8.0}, fixed(8.0, False)),
    (P.apex_amp, {"init_scale": 2.0**30}, dynamic(2.0**24, 2000, largest=2.0**24)),
    (
        P.apex_amp,
        dict(init_scale=8.0, scale_window=5, min_loss_scale=4.0, max_loss_scale=16.0),
        dynamic(8.0, 5, 4.0, 16.0),
    ),
    (P.deepspeed, {}, verbatim(2.0**16, 1000, 1.0, hysteresis=2, **LATE)),
    (P.deepspeed, {"first_growth_late": False}, dynamic(2.0**16, 1000, 1.0, **BOTH)),
    (
        P.deepspeed,
        dict(init_scale=8.0, scale_factor=4.0, scale_window=5, min_scale=0.0)
        | dict(
            delayed_shift=3, consecutive_hysteresis=True, raise_error_at_min_scale=False
        ),
        verbatim(8.0, 5, first_growth_late=True, hysteresis=3, **BY_FOUR),
    ),
    (P.deepspeed_fp16, {}, verbatim(2.0**16, 1000, 1.0, hysteresis=2, **LATE)),
    (P.deepspeed_fp16, {"enabled": False}, fixed(1.0, True)),
    (P.deepspeed_fp16, {"loss_scale": 8.0}, fixed(8.0, True)),
    (
        P.deepspeed_fp16,
        dict(initial_scale_power=12, loss_scale_window=5, hysteresis=3)
        | dict(consecutive_hysteresis=True, min_loss_scale=4.0)
        | dict(auto_cast=True, fp16_master_weights_and_grads=True),
        verbatim(2.0**12, 5, 4.0, first_growth_late=True, hysteresis=3),
    ),
    (P.fairseq, {}, dynamic(2.0**15, 2000, 2.0**-13)),
    (
        P.fairseq,  # the scale stays above the minimum
        dict(init_scale=8.0, scale_factor=4.0, scale_window=5, min_loss_scale=2.0**-5),
        dynamic(8.0, 5, 2.0**-3, **BY_FOUR),
    ),
    (P.fairseq, {"threshold": 3.0}, dynamic(2.0**15, 2000, 3.0)),
    # It grows one step later than documented.
    (P.flax_dynamic_scale, {}, dynamic(2.0**16, 2001)),
    (P.flax_dynamic_scale, {"minimum_scale": None}, dynamic(2.0**16, 2001)),
    (
        P.flax_dynamic_scale,
        dict(growth_factor=4.0, backoff_factor=0.125, growth_interval=5)
        | dict(scale=8.0, minimum_scale=1.0),
        dynamic(8.0, 6, 1.0, growth_factor=4.0, backoff_factor=0.125),
    ),
    (P.jmp_dynamic, {"loss_scale": jnp.int32(8)}, dynamic(8.0, 2000, 1.0)),
    (
        P.jmp_dynamic,
        dict(loss_scale=jnp.float16(8), period=5, factor=4.0, min_loss_scale=2.0),
        dynamic(8.0, 5, 2.0, **BY_FOUR),
    ),
    (P.jmp_static, {"loss_scale": 8.0}, fixed(8.0, True)),
    (P.keras_loss_scale, {}, dynamic(2.0**15, 2000)),
    (
        P.keras_loss_scale,
        dict(initial_scale=8.0, dynamic_growth_steps=5, dynamic=True),
        dynamic(8.0, 5),
    ),
    (P.megatron, {}, dynamic(2.0**32, 1000, 1.0, **BOTH)),
    (
        P.megatron,
        dict(initial_scale=8.0, min_scale=4.0, growth_factor=4.0)
        | dict(backoff_factor=0.125, growth_interval=5, hysteresis=3),
        dynamic(
            *(8.0, 5, 4.0),
            **dict(growth_factor=4.0, backoff_factor=0.125),
            **dict(hysteresis=3, hysteresis_refill="growth"),
        ),
    ),
    (P.mindspore_dynamic, {}, dynamic(2.0**24, 2000, 1.0)),
    (
        P.mindspore_dynamic,
        dict(init_loss_scale=8.0, scale_factor=4.0, scale_window=5),
        dynamic(8.0, 5, 1.0, **BY_FOUR),
    ),
    (P.mindspore_fixed, {}, fixed(128.0, True)),
    (
        P.mindspore_fixed,
        dict(loss_scale=8.0, drop_overflow_update=False),
        fixed(8.0, False),
    ),
    (P.mpx_dynamic, {"loss_scaling": 8.0}, dynamic(8.0, 2000, 1.0, 65504.0)),
    (
        P.mpx_dynamic,
        dict(loss_scaling=65536.0, min_loss_scaling=4.0, factor=4.0, period=5),
        verbatim(65536.0, 5, 4.0, 65504.0, **BY_FOUR),
    ),
    (
        P.tf_contrib_exponential_update,
        dict(init_loss_scale=8.0, incr_every_n_steps=100),
        dynamic(
            8.0, 100, 1.0, backoff_factor=0.8, hysteresis=2, hysteresis_refill="change"
        ),
    ),
    (
        P.tf_contrib_exponential_update,
        dict(init_loss_scale=8.0, incr_every_n_steps=5, incr_ratio=4.0)
        | dict(decr_every_n_nan_or_inf=3, decr_ratio=0.25),
        dynamic(8.0, 5, 1.0, hysteresis=3, hysteresis_refill="change", **BY_FOUR),
    ),
    (P.tf_contrib_fixed, {"loss_scale": 8.0}, fixed(8.0, True)),
    (P.tf_dynamic_loss_scale, {}, dynamic(2.0**15, 2000, 1.0)),
    (
        P.tf_dynamic_loss_scale,
        dict(initial_loss_scale=0.5, increment_period=5, multiplier=4.0),
        verbatim(0.5, 5, 1.0, **BY_FOUR),
    ),
    (P.tf_fixed_loss_scale, {"loss_scale_value": 8.0}, fixed(8.0, False)),
    (P.tf_keras_loss_scale, {}, dynamic(2.0**15, 2000, 1.0)),
    (
        P.tf_keras_loss_scale,
        dict(initial_scale=8.0, dynamic_growth_steps=5),
        dynamic(8.0, 5, 1.0),
    ),
    (
        P.tf_keras_loss_scale,
        dict(dynamic=False, initial_scale=8.0),
        fixed(8.0, False),
    ),
    (P.torch_grad_scaler, {}, dynamic(2.0**16, 2000)),
    (
        P.torch_grad_scaler,
        dict(
            init_scale=8.0, growth_factor=4.0, backoff_factor=0.125, growth_interval=5
        ),
        dynamic(8.0, 5, growth_factor=4.0, backoff_factor=0.125),
    ),
    (P.torch_grad_scaler, {"enabled": False}, fixed(1.0, False)),
]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_of_its_arguments_what_the_table_says(name):
    preset = getattr(presets, name)
    rows = [(given, rule) for function, given, rule in TABLE if function is preset]
    for given, rule in rows:
        assert preset(**given) == rule, given
    parameters = inspect.signature(preset).parameters
    without_default = {n for n, p in parameters.items() if p.default is p.empty}
    assert rows[0][0].keys() == without_default
    assert set().union(*(given for given, _ in rows)) == parameters.keys()


def test_arguments_that_do_not_go_together_are_refused_by_their_names():
    with pytest.raises(ValueError, match="^`dynamic_growth_steps` must be left out"):
        presets.tf_keras_loss_scale(False, 8.0, dynamic_growth_steps=3)
    with pytest.raises(ValueError, match="^`min_loss_scaling` must be .* 0 to 65504"):
        presets.mpx_dynamic(8.0, min_loss_scaling=65505.0)
    with pytest.raises(ValueError, match="^`min_loss_scale` must not exceed `max_loss"):
        presets.apex_amp(min_loss_scale=8.0, max_loss_scale=4.0)
