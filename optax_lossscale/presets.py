"""The loss-scaling rules of other systems, by their arguments and defaults.

Each function returns a `DynamicLossScale`, or a `FixedLossScale` where the system has a
constant scale. The tests replay scales that were recorded from the systems. What would
break a training is left out: a scale stays between 2**-126 and 2**126, where some
systems let it become 0 or infinite. The first scale may be positional. An argument that
is out of range raises ValueError, and one that is left out here TypeError.

A run that began in another system goes on from its scale and its counters: see the
guides for those who come from another system.

Examples:
    >>> import optax
    >>> import optax_lossscale as ls
    >>> rule = ls.presets.torch_grad_scaler(growth_interval=500)
    >>> tx = ls.with_loss_scaling(optax.adamw(3e-4), rule)
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from ._rules.dynamic import DynamicLossScale
from ._rules.fixed import FixedLossScale
from ._validation import BOOK, check_field, check_number, check_switch, describe

__all__ = [
    "apex_amp",
    "deepspeed",
    "deepspeed_fp16",
    "fairseq",
    "flax_dynamic_scale",
    "jmp_dynamic",
    "keras_loss_scale",
    "megatron",
    "mindspore_dynamic",
    "mpx_dynamic",
    "tf_contrib_exponential_update",
    "tf_dynamic_loss_scale",
    "tf_keras_loss_scale",
    "torch_grad_scaler",
]

_PresetT = TypeVar("_PresetT", bound=Callable[..., Any])

# The fields of `DynamicLossScale`, and what the systems call them.
_NAMES = {
    "init_scale": "loss_scale init_scale initial_scale init_loss_scale "
    "initial_loss_scale scale loss_scaling",
    "growth_interval": "growth_interval scale_window loss_scale_window period "
    "dynamic_growth_steps increment_period incr_every_n_steps",
    "growth_factor": "growth_factor scale_factor factor multiplier incr_ratio",
    "backoff_factor": "backoff_factor decr_ratio",
    "min_scale": "min_scale min_loss_scale min_loss_scaling minimum_scale",
    "max_scale": "max_loss_scale",
    "hysteresis": "hysteresis delayed_shift decr_every_n_nan_or_inf",
    "hysteresis_refill": "consecutive_hysteresis",
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names.split()}
# What `help` says of a field, or of another argument.
_MEANINGS = {
    "init_scale": "the first scale.",
    "growth_interval": "how many finite steps in a row raise the scale.",
    "growth_factor": "multiplies a scale that grows.",
    "backoff_factor": "multiplies a scale that backs off.",
    "min_scale": "the smallest scale; None or 0 is 2**-126.",
    "max_scale": "the largest scale.",
    "hysteresis": "how many non-finite steps it takes to back off.",
    "hysteresis_refill": "whether any finite step resets the hysteresis counter.",
    "auto_cast": "does not concern the scale.",
    "dynamic": "whether the scale changes.",
    "enabled": "whether the loss is scaled.",
    "fp16_master_weights_and_grads": "does not concern the scale.",
    "initial_scale_power": "the first scale is 2 to this power.",
    "loss_scale": "the first scale, or a constant one.",
    "raise_error_at_min_scale": "is ignored: a compiled step cannot raise.",
    "threshold": "the smallest scale if it is above ``min_loss_scale``.",
}
_LEFT_OUT = {
    "counter": "Set `growth_tracker` in the state that `init` returns.",
    "device": "The scale is where the optimizer state is.",
    "dtype": "It does not concern the scale.",
    "fin_steps": "Set `growth_tracker` in the state that `init` returns.",
    "inner_optimizer": "Pass the optimizer to `with_loss_scaling`.",
    "scale_factor": "Apex does not use it: its factor is 2.",
    "tolerance": f"Write a rule: {BOOK}how_the_scale_moves.ipynb#write-your-own",
}


def _preset(function: _PresetT) -> _PresetT:
    """Return a preset that documents its arguments and says why it refuses others."""
    arguments = inspect.signature(function).parameters

    @functools.wraps(function)
    def preset(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - arguments.keys():
            raise TypeError(
                f"`{name}` is not an argument of `presets.{function.__name__}`, got "
                f"{describe(kwargs[name])}. "
                + _LEFT_OUT.get(name, f"It takes {', '.join(arguments)}.")
            )
        return function(*args, **kwargs)

    meanings = {x: _MEANINGS.get(x) or _MEANINGS[_FIELDS[x]] for x in arguments}
    lines = [f"    {name}: {meaning}" for name, meaning in meanings.items()]
    text = inspect.cleandoc(function.__doc__ or "")
    preset.__doc__ = "\n".join([text, "", "Args:", *lines])
    return cast(_PresetT, preset)


@_preset
def apex_amp(
    loss_scale: Any = "dynamic",
    *,
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``apex.amp``. A constant ``loss_scale`` skips nothing.

    Source: https://github.com/NVIDIA/apex/blob/25.04/apex/amp/scaler.py
    """
    if loss_scale != "dynamic":
        return FixedLossScale(loss_scale, skip_nonfinite=False)
    largest = check_field("max_scale", max_loss_scale, "max_loss_scale")
    first = min(check_field("init_scale", init_scale), largest)
    return _dynamic(locals(), init_scale=first)


@_preset
def deepspeed(
    init_scale: float = 2.0**16,
    *,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float | None = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> DynamicLossScale:
    """Return the rule of DeepSpeed's ``DynamicLossScaler`` (ZeRO).

    Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py
    """
    return _dynamic(locals())


@_preset
def deepspeed_fp16(
    *,
    enabled: bool = True,
    loss_scale: float = 0.0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float | None = 1.0,
    auto_cast: bool = False,
    fp16_master_weights_and_grads: bool = False,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of the ``"fp16"`` section of a DeepSpeed configuration.

    Source: https://www.deepspeed.ai/docs/config-json/#fp16-training-options
    """
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0)
    if loss_scale != 0:
        return FixedLossScale(loss_scale)
    advice = "The first scale is 2 to this power."
    power = check_number("initial_scale_power", initial_scale_power, -126, 126, advice)
    return _dynamic(locals(), init_scale=2.0**power)


@_preset
def fairseq(
    init_scale: float = 2.0**15,
    *,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    threshold: float | None = None,
    min_loss_scale: float | None = 1e-4,
) -> DynamicLossScale:
    """Return the rule of fairseq's ``DynamicLossScaler``.

    fairseq undoes a backoff to ``min_loss_scale`` or below, so the smallest scale is
    the last one above.

    Source: https://github.com/facebookresearch/fairseq/blob/main/fairseq/optim/dynamic_loss_scaler.py
    """
    rule = _dynamic(locals())
    least = rule.init_scale
    while least / rule.growth_factor > rule.min_scale:
        least /= rule.growth_factor
    if threshold is not None:
        threshold = check_field("min_scale", threshold, "threshold")
        least = threshold if threshold > rule.min_scale else least
    return _dynamic(locals(), min_scale=least)


@_preset
def flax_dynamic_scale(
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 2.0**16,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> DynamicLossScale:
    """Return the rule of ``flax.training.dynamic_scale.DynamicScale``.

    Flax grows the scale one step later than it documents.

    Source: https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py
    """
    interval = check_field("growth_interval", growth_interval) + 1
    return _dynamic(locals(), growth_interval=interval)


@_preset
def jmp_dynamic(
    loss_scale: Any,
    *,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float | None = 1.0,
) -> DynamicLossScale:
    """Return the rule of ``jmp.DynamicLossScale``.

    Source: https://github.com/google-deepmind/jmp#loss-scaling
    """
    return _dynamic(locals())


@_preset
def keras_loss_scale(
    initial_scale: float = 2.0**15,
    *,
    dynamic_growth_steps: int = 2000,
    dynamic: bool = True,
) -> DynamicLossScale:
    """Return the rule of Keras 3's ``LossScaleOptimizer``, which is always dynamic.

    Source: https://keras.io/api/optimizers/loss_scale_optimizer/
    """
    if dynamic is not True:
        raise ValueError(
            f"`dynamic` must be True, got {dynamic!r}. For a scale that never changes, "
            "use `FixedLossScale`."
        )
    return _dynamic(locals())


@_preset
def megatron(
    initial_scale: float = 2.0**32,
    *,
    min_scale: float | None = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Return the rule of Megatron-LM's ``DynamicGradScaler``.

    Non-finite steps need not be consecutive to use the hysteresis up: that is what
    Megatron-LM does, although it documents otherwise.

    Source: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py
    """
    return _dynamic(locals(), hysteresis_refill="growth")


@_preset
def mindspore_dynamic(
    init_loss_scale: float = 2.0**24,
    *,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> DynamicLossScale:
    """Return the rule of MindSpore's ``DynamicLossScaleManager``. The minimum is 1.

    Source: https://www.mindspore.cn/docs/en/master/api_python/amp/mindspore.amp.DynamicLossScaleManager.html
    """
    return _dynamic(locals(), min_scale=1.0)


@_preset
def mpx_dynamic(
    loss_scaling: Any,
    *,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> DynamicLossScale:
    """Return the rule of ``mpx.DynamicLossScaling``. The maximum is 65504.

    Source: https://github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX
    """
    return _dynamic(locals(), max_scale=65504.0)


@_preset
def tf_contrib_exponential_update(
    init_loss_scale: float,
    *,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> DynamicLossScale:
    """Return the rule of ``tf.contrib``'s ``ExponentialUpdateLossScaleManager``.

    Non-finite steps are counted across finite ones. The minimum is 1.

    Source: https://github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/contrib/mixed_precision/python/loss_scale_manager.py
    """
    return _dynamic(locals(), min_scale=1.0, hysteresis_refill="change")


@_preset
def tf_dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15,
    *,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """Return the rule of TensorFlow's ``DynamicLossScale``. The minimum is 1.

    Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/DynamicLossScale
    """
    return _dynamic(locals(), min_scale=1.0)


@_preset
def tf_keras_loss_scale(
    *,
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``tf.keras``'s ``LossScaleOptimizer`` (Keras 2).

    The default numbers are 2**15 and 2,000. Without ``dynamic``, ``initial_scale`` is
    constant, and nothing is skipped.

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer
    """
    if not check_switch("dynamic", dynamic, "Pass a number as `initial_scale`."):
        if dynamic_growth_steps is not None:
            raise ValueError(
                "`dynamic_growth_steps` must be left out if `dynamic` is False, got "
                f"{dynamic_growth_steps!r}. A constant scale does not use it."
            )
        return FixedLossScale(initial_scale, skip_nonfinite=False)  # type: ignore[arg-type]
    first = 2.0**15 if initial_scale is None else initial_scale
    steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
    return _dynamic(locals(), init_scale=first, growth_interval=steps, min_scale=1.0)


@_preset
def torch_grad_scaler(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``torch.amp.GradScaler``.

    Unless ``enabled``, nothing is scaled, checked or skipped.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0, skip_nonfinite=False)
    return _dynamic(locals())


def _dynamic(arguments: dict[str, Any], **fixed: Any) -> DynamicLossScale:
    """Return the rule of a preset's arguments, and of fields that its system fixes.

    ``arguments`` are the ``locals()`` of the preset, by the names of its system.
    ``fixed`` come before these. By default, a rule has no limits and divides by the
    growth factor.
    """
    fields = {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE, **fixed}
    for name, field in reversed(_FIELDS.items()):  # the first scale after its limits
        if name not in arguments:
            continue
        value = fixed.get(field, arguments[name])
        if field == "init_scale":
            limits = fields["min_scale"], fields["max_scale"]
            value = check_number(name, value, *limits, "The scale stays there.")
        elif field == "min_scale":
            value = 0 if value is None else value
            value = check_number(name, value, 0, LARGEST_SCALE, "0 is 2**-126.")
            value = max(value, SMALLEST_SCALE)
        elif field == "hysteresis_refill":
            value = check_switch(name, value, "It decides what resets the counter.")
            value = "finite" if value else "growth"
        else:
            value = check_field(field, value, name)
        fields[field] = value
    fields.setdefault("backoff_factor", 1 / fields.get("growth_factor", 2.0))
    return DynamicLossScale(**fields)
