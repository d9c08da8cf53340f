"""The loss-scaling rules of other systems, by their arguments and defaults.

Each function returns a `DynamicLossScale`, or a `FixedLossScale` where the system has a
constant scale. The tests replay scales that were recorded from the systems. What would
break a training is left out: a scale stays between 2**-126 and 2**126, where some
systems let it become 0 or infinite. Only the first scale may be positional. A number
out of range raises ValueError, and an argument that is not here TypeError.

A run that began in another system continues from its scale and its counters: see the
guides for those who come from another system.

Examples:
    >>> import optax
    >>> import optax_lossscale as ls
    >>> rule = ls.presets.torch_grad_scaler(growth_interval=500)
    >>> tx = ls.with_loss_scaling(optax.adamw(3e-4), rule)
"""

from typing import Any, NamedTuple

from ._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from ._rules.dynamic import DynamicLossScale
from ._rules.fields import check_field
from ._rules.fixed import FixedLossScale
from ._validation import check_number, check_switch

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


def __dir__() -> list[str]:
    return __all__


def apex_amp(
    loss_scale: Any = "dynamic",
    *,
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``apex.amp``.

    Apex does not use its argument ``scale_factor``: its factor is 2.

    Args:
        loss_scale: ``"dynamic"``, or a constant scale. With a constant one, nothing is
            skipped.
        init_scale: the first scale.
        scale_window: how many finite steps in a row raise the scale.
        min_loss_scale: the smallest scale; None or 0 means 2**-126.
        max_loss_scale: the largest scale.

    Source: https://github.com/NVIDIA/apex/blob/25.04/apex/amp/scaler.py
    """
    if loss_scale != "dynamic":
        return FixedLossScale(loss_scale, skip_nonfinite=False)
    largest = check_field("max_scale", max_loss_scale, "max_loss_scale")
    return _dynamic(
        init_scale=min(check_field("init_scale", init_scale), largest),
        growth_interval=_Named(scale_window, "scale_window"),
        min_scale=_Named(min_loss_scale, "min_loss_scale"),
        max_scale=largest,
    )


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

    Its argument ``dtype`` does not concern the scale and is left out.

    Args:
        init_scale: the first scale.
        scale_factor: multiplies a scale that grows, and divides one that backs off.
        scale_window: how many finite steps in a row raise the scale.
        min_scale: the smallest scale; None or 0 means 2**-126.
        delayed_shift: how many non-finite steps it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        raise_error_at_min_scale: is ignored: a compiled step cannot raise.

    Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py
    """
    return _dynamic(
        init_scale=init_scale,
        factor=_Named(scale_factor, "scale_factor"),
        growth_interval=_Named(scale_window, "scale_window"),
        min_scale=min_scale,
        hysteresis=_Named(delayed_shift, "delayed_shift"),
        hysteresis_refill=_refill(consecutive_hysteresis),
    )


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

    Args:
        enabled: whether the loss is scaled.
        loss_scale: a constant scale, or 0 for a dynamic one.
        initial_scale_power: the first scale is 2 to this power.
        loss_scale_window: how many finite steps in a row raise the scale.
        hysteresis: how many non-finite steps it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        min_loss_scale: the smallest scale; None or 0 means 2**-126.
        auto_cast: does not concern the scale.
        fp16_master_weights_and_grads: does not concern the scale.

    Source: https://www.deepspeed.ai/docs/config-json/#fp16-training-options
    """
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0)
    if loss_scale != 0:
        return FixedLossScale(loss_scale)
    advice = "The first scale is 2 to this power."
    power = check_number("initial_scale_power", initial_scale_power, -126, 126, advice)
    return _dynamic(
        init_scale=_Named(2.0**power, "2**initial_scale_power"),
        growth_interval=_Named(loss_scale_window, "loss_scale_window"),
        min_scale=_Named(min_loss_scale, "min_loss_scale"),
        hysteresis=hysteresis,
        hysteresis_refill=_refill(consecutive_hysteresis),
    )


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
    the last one above. Its ``tolerance`` is left out: it needs a rule of your own.

    Args:
        init_scale: the first scale.
        scale_factor: multiplies a scale that grows, and divides one that backs off.
        scale_window: how many finite steps in a row raise the scale.
        threshold: the smallest scale if it is above ``min_loss_scale``.
        min_loss_scale: the smallest scale; None or 0 means 2**-126.

    Source: https://github.com/facebookresearch/fairseq/blob/main/fairseq/optim/dynamic_loss_scaler.py
    """
    lowest = _least(min_loss_scale, "min_loss_scale")
    factor = check_field("growth_factor", scale_factor, "scale_factor")
    least = _first(init_scale, least=lowest)
    while least / factor > lowest:
        least /= factor
    if threshold is not None:
        threshold = check_field("min_scale", threshold, "threshold")
        least = threshold if threshold > lowest else least
    return _dynamic(
        init_scale=init_scale,
        factor=factor,
        growth_interval=_Named(scale_window, "scale_window"),
        min_scale=least,
    )


def flax_dynamic_scale(
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 2.0**16,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> DynamicLossScale:
    """Return the rule of ``flax.training.dynamic_scale.DynamicScale``.

    Flax grows the scale one step later than it documents. To continue from its
    ``fin_steps``, set `growth_tracker` in the state that `init` returns.

    Args:
        growth_factor: multiplies a scale that grows.
        backoff_factor: multiplies a scale that backs off.
        growth_interval: how many finite steps in a row raise the scale.
        scale: the first scale.
        minimum_scale: the smallest scale; None or 0 means 2**-126.

    Source: https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py
    """
    return _dynamic(
        init_scale=_Named(scale, "scale"),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=check_field("growth_interval", growth_interval) + 1,
        min_scale=_Named(minimum_scale, "minimum_scale"),
    )


def jmp_dynamic(
    loss_scale: Any,
    *,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float | None = 1.0,
) -> DynamicLossScale:
    """Return the rule of ``jmp.DynamicLossScale``.

    To continue from its ``counter``, set `growth_tracker` in the state that `init`
    returns.

    Args:
        loss_scale: the first scale.
        period: how many finite steps in a row raise the scale.
        factor: multiplies a scale that grows, and divides one that backs off.
        min_loss_scale: the smallest scale; None or 0 means 2**-126.

    Source: https://github.com/google-deepmind/jmp#loss-scaling
    """
    return _dynamic(
        init_scale=_Named(loss_scale, "loss_scale"),
        factor=_Named(factor, "factor"),
        growth_interval=_Named(period, "period"),
        min_scale=_Named(min_loss_scale, "min_loss_scale"),
    )


def keras_loss_scale(
    initial_scale: float = 2.0**15,
    *,
    dynamic_growth_steps: int = 2000,
    dynamic: bool = True,
) -> DynamicLossScale:
    """Return the rule of Keras 3's ``LossScaleOptimizer``, which is always dynamic.

    Its ``inner_optimizer`` is the argument of `with_loss_scaling`.

    Args:
        initial_scale: the first scale.
        dynamic_growth_steps: how many finite steps in a row raise the scale.
        dynamic: True. `FixedLossScale` is the rule of a scale that never changes.

    Source: https://keras.io/api/optimizers/loss_scale_optimizer/
    """
    if dynamic is not True:
        raise ValueError(
            f"`dynamic` must be True, got {dynamic!r}. For a scale that never changes, "
            "use `FixedLossScale`."
        )
    return _dynamic(
        init_scale=_Named(initial_scale, "initial_scale"),
        growth_interval=_Named(dynamic_growth_steps, "dynamic_growth_steps"),
    )


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

    Args:
        initial_scale: the first scale.
        min_scale: the smallest scale; None or 0 means 2**-126.
        growth_factor: multiplies a scale that grows.
        backoff_factor: multiplies a scale that backs off.
        growth_interval: how many finite steps in a row raise the scale.
        hysteresis: how many non-finite steps it takes to back off.

    Source: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py
    """
    return _dynamic(
        init_scale=_Named(initial_scale, "initial_scale"),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        hysteresis=hysteresis,
        hysteresis_refill="growth",
    )


def mindspore_dynamic(
    init_loss_scale: float = 2.0**24,
    *,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> DynamicLossScale:
    """Return the rule of MindSpore's ``DynamicLossScaleManager``. The minimum is 1.

    Args:
        init_loss_scale: the first scale.
        scale_factor: multiplies a scale that grows, and divides one that backs off.
        scale_window: how many finite steps in a row raise the scale.

    Source: https://www.mindspore.cn/docs/en/master/api_python/amp/mindspore.amp.DynamicLossScaleManager.html
    """
    return _dynamic(
        init_scale=_Named(init_loss_scale, "init_loss_scale"),
        factor=_Named(scale_factor, "scale_factor"),
        growth_interval=_Named(scale_window, "scale_window"),
        min_scale=1.0,
    )


def mpx_dynamic(
    loss_scaling: Any,
    *,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> DynamicLossScale:
    """Return the rule of ``mpx.DynamicLossScaling``. The maximum is 65504.

    To continue from its ``counter``, set `growth_tracker` in the state that `init`
    returns.

    Args:
        loss_scaling: the first scale.
        min_loss_scaling: the smallest scale; None or 0 means 2**-126.
        factor: multiplies a scale that grows, and divides one that backs off.
        period: how many finite steps in a row raise the scale.

    Source: https://github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX
    """
    return _dynamic(
        init_scale=_Named(loss_scaling, "loss_scaling"),
        factor=_Named(factor, "factor"),
        growth_interval=_Named(period, "period"),
        min_scale=_Named(min_loss_scaling, "min_loss_scaling"),
        max_scale=65504.0,
    )


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

    Args:
        init_loss_scale: the first scale.
        incr_every_n_steps: how many finite steps in a row raise the scale.
        decr_every_n_nan_or_inf: how many non-finite steps it takes to back off.
        incr_ratio: multiplies a scale that grows.
        decr_ratio: multiplies a scale that backs off.

    Source: https://github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/contrib/mixed_precision/python/loss_scale_manager.py
    """
    return _dynamic(
        init_scale=_Named(init_loss_scale, "init_loss_scale"),
        growth_factor=_Named(incr_ratio, "incr_ratio"),
        backoff_factor=_Named(decr_ratio, "decr_ratio"),
        growth_interval=_Named(incr_every_n_steps, "incr_every_n_steps"),
        min_scale=1.0,
        hysteresis=_Named(decr_every_n_nan_or_inf, "decr_every_n_nan_or_inf"),
        hysteresis_refill="change",
    )


def tf_dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15,
    *,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """Return the rule of TensorFlow's ``DynamicLossScale``. The minimum is 1.

    Args:
        initial_loss_scale: the first scale.
        increment_period: how many finite steps in a row raise the scale.
        multiplier: multiplies a scale that grows, and divides one that backs off.

    Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/DynamicLossScale
    """
    return _dynamic(
        init_scale=_Named(initial_loss_scale, "initial_loss_scale"),
        factor=_Named(multiplier, "multiplier"),
        growth_interval=_Named(increment_period, "increment_period"),
        min_scale=1.0,
    )


def tf_keras_loss_scale(
    *,
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``tf.keras``'s ``LossScaleOptimizer`` (Keras 2).

    Its ``inner_optimizer`` is the argument of `with_loss_scaling`. The minimum is 1.

    Args:
        dynamic: whether the scale changes. If False, ``initial_scale`` is constant, and
            nothing is skipped.
        initial_scale: the first scale; None is 2**15.
        dynamic_growth_steps: how many finite steps in a row raise the scale; None is
            2,000.

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
    return _dynamic(
        init_scale=_Named(first, "initial_scale"),
        growth_interval=_Named(steps, "dynamic_growth_steps"),
        min_scale=1.0,
    )


def torch_grad_scaler(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``torch.amp.GradScaler``.

    Its ``device`` is left out: the scale is where the optimizer state is.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies a scale that grows.
        backoff_factor: multiplies a scale that backs off.
        growth_interval: how many finite steps in a row raise the scale.
        enabled: whether the loss is scaled. If False, nothing is scaled, checked or
            skipped.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0, skip_nonfinite=False)
    return _dynamic(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )


class _Named(NamedTuple):
    """A field that its system calls otherwise, as errors do."""

    value: Any
    name: str


def _dynamic(
    *, init_scale: Any, min_scale: Any = None, factor: Any = None, **fields: Any
) -> DynamicLossScale:
    """Return a rule from its fields.

    ``factor`` multiplies a scale that grows, and divides one that backs off.
    """
    if factor is not None:
        fields["growth_factor"] = factor
    fields.setdefault("max_scale", LARGEST_SCALE)
    fields = {field: check_field(field, *_with_name(x)) for field, x in fields.items()}
    if factor is not None:
        fields["backoff_factor"] = 1 / fields["growth_factor"]
    least = _least(*_with_name(min_scale))
    first = _first(*_with_name(init_scale), least=least, largest=fields["max_scale"])
    return DynamicLossScale(first, min_scale=least, **fields)


def _with_name(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, _Named) else (x,)


def _least(value: Any, name: str = "min_scale") -> float:
    """Return the smallest scale. None and 0 mean that there is no limit."""
    value = 0 if value is None else value
    advice = "0 means no lower limit (2**-126)."
    return max(check_number(name, value, 0, LARGEST_SCALE, advice), SMALLEST_SCALE)


def _first(
    value: Any,
    name: str = "init_scale",
    *,
    least: float,
    largest: float = LARGEST_SCALE,
) -> float:
    advice = "The scale never leaves this range."
    return check_number(name, value, least, largest, advice)


def _refill(consecutive_hysteresis: Any) -> Any:
    advice = "It decides what resets the counter."
    name = "consecutive_hysteresis"
    return "finite" if check_switch(name, consecutive_hysteresis, advice) else "growth"
