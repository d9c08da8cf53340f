"""The loss-scaling rules of other systems, by their arguments and defaults.

Each function returns a `DynamicLossScale`, or a `FixedLossScale` where the system has a
constant scale. The tests replay scales that were recorded from the systems. What would
break a training is left out: a scale stays between 2**-126 and 2**126, where some
systems let it become 0 or infinite. An argument that is out of range raises ValueError.

A run that began in another system goes on from its scale and its counters: see the
guides for those who come from another system.

Examples:
    >>> import optax
    >>> import optax_lossscale as ls
    >>> rule = ls.presets.torch_grad_scaler(growth_interval=500)
    >>> tx = ls.with_loss_scaling(optax.adamw(3e-4), rule)
"""

import math
from typing import Any

from ._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from ._rules.dynamic import DynamicLossScale
from ._rules.fixed import FixedLossScale
from ._validation import check_field, check_switch

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


def apex_amp(
    loss_scale: Any = "dynamic",
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
    limits = {"min_scale": _least(min_loss_scale), "max_scale": max_loss_scale}
    return _dynamic(min(init_scale, max_loss_scale), scale_window, **limits)


def deepspeed(
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> DynamicLossScale:
    """Return the rule of DeepSpeed's ``DynamicLossScaler`` (ZeRO).

    A compiled step cannot raise, so ``raise_error_at_min_scale`` is ignored.

    Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py
    """
    del raise_error_at_min_scale
    return _dynamic(
        init_scale,
        scale_window,
        scale_factor,
        min_scale=_least(min_scale),
        hysteresis=delayed_shift,
        hysteresis_refill="finite" if consecutive_hysteresis else "growth",
    )


def deepspeed_fp16(
    enabled: bool = True,
    loss_scale: float = 0.0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
    auto_cast: bool = False,
    fp16_master_weights_and_grads: bool = False,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of the ``"fp16"`` section of a DeepSpeed configuration.

    The last two arguments do not concern the scale.

    Source: https://www.deepspeed.ai/docs/config-json/#fp16-training-options
    """
    del auto_cast, fp16_master_weights_and_grads
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0)
    if loss_scale != 0:
        return FixedLossScale(loss_scale)
    return deepspeed(
        2.0**initial_scale_power,
        scale_window=loss_scale_window,
        min_scale=min_loss_scale,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
    )


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> DynamicLossScale:
    """Return the rule of fairseq's ``DynamicLossScaler``.

    fairseq undoes a backoff to ``min_loss_scale`` or below, so the smallest scale is
    the last one above. A larger ``threshold`` is the smallest scale.

    Source: https://github.com/facebookresearch/fairseq/blob/main/fairseq/optim/dynamic_loss_scaler.py
    """
    rule = _dynamic(init_scale, scale_window, scale_factor)
    lowest = check_field("min_scale", _least(min_loss_scale))
    backoffs = math.floor(math.log(rule.init_scale / lowest, rule.growth_factor))
    # The logarithm may round.
    near = [init_scale / scale_factor**n for n in range(backoffs - 1, backoffs + 2)]
    least = min([init_scale, *(x for x in near if x > lowest)])
    if threshold is not None and threshold > lowest:
        least = threshold
    return _dynamic(init_scale, scale_window, scale_factor, min_scale=_least(least))


def flax_dynamic_scale(
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
    return _dynamic(
        scale,
        growth_interval + 1,
        growth_factor,
        backoff_factor,
        min_scale=_least(minimum_scale),
    )


def jmp_dynamic(
    loss_scale: Any,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """Return the rule of ``jmp.DynamicLossScale``.

    Source: https://github.com/google-deepmind/jmp#loss-scaling
    """
    return _dynamic(loss_scale, period, factor, min_scale=_least(min_loss_scale))


def keras_loss_scale(
    initial_scale: float = 2.0**15,
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
    return _dynamic(initial_scale, dynamic_growth_steps)


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
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
    return _dynamic(
        initial_scale,
        growth_interval,
        growth_factor,
        backoff_factor,
        min_scale=_least(min_scale),
        hysteresis=hysteresis,
        hysteresis_refill="growth",
    )


def mindspore_dynamic(
    init_loss_scale: float = 2.0**24,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> DynamicLossScale:
    """Return the rule of MindSpore's ``DynamicLossScaleManager``. The minimum is 1.

    Source: https://www.mindspore.cn/docs/en/master/api_python/amp/mindspore.amp.DynamicLossScaleManager.html
    """
    return _dynamic(init_loss_scale, scale_window, scale_factor, min_scale=1.0)


def mpx_dynamic(
    loss_scaling: Any,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> DynamicLossScale:
    """Return the rule of ``mpx.DynamicLossScaling``. The maximum is 65504.

    Source: https://github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX
    """
    limits = {"min_scale": _least(min_loss_scaling), "max_scale": 65504.0}
    return _dynamic(loss_scaling, period, factor, **limits)


def tf_contrib_exponential_update(
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> DynamicLossScale:
    """Return the rule of ``tf.contrib``'s ``ExponentialUpdateLossScaleManager``.

    Non-finite steps are counted across finite ones. The minimum is 1.

    Source: https://github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/contrib/mixed_precision/python/loss_scale_manager.py
    """
    return _dynamic(
        init_loss_scale,
        incr_every_n_steps,
        incr_ratio,
        decr_ratio,
        min_scale=1.0,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="change",
    )


def tf_dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """Return the rule of TensorFlow's ``DynamicLossScale``. The minimum is 1.

    Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/DynamicLossScale
    """
    return _dynamic(initial_loss_scale, increment_period, multiplier, min_scale=1.0)


def tf_keras_loss_scale(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> DynamicLossScale | FixedLossScale:
    """Return the rule of ``tf.keras``'s ``LossScaleOptimizer`` (Keras 2).

    Without ``dynamic``, ``initial_scale`` is constant, and nothing is skipped.

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer
    """
    if check_switch("dynamic", dynamic, "Pass a number as `initial_scale`."):
        first = 2.0**15 if initial_scale is None else initial_scale
        steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
        return tf_dynamic_loss_scale(first, steps)
    if dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be left out if `dynamic` is False, got "
            f"{dynamic_growth_steps!r}. A constant scale does not use it."
        )
    return FixedLossScale(initial_scale, skip_nonfinite=False)  # type: ignore[arg-type]


def torch_grad_scaler(
    init_scale: float = 2.0**16,
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
    return _dynamic(init_scale, growth_interval, growth_factor, backoff_factor)


def _dynamic(
    init_scale: float,
    growth_interval: int,
    growth_factor: float = 2.0,
    backoff_factor: float | None = None,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = LARGEST_SCALE,
    **hysteresis: Any,
) -> DynamicLossScale:
    """Return a rule without limits that, by default, divides by the growth factor."""
    if backoff_factor is None:
        backoff_factor = 1 / growth_factor
    return DynamicLossScale(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        **hysteresis,
    )


def _least(scale: float | None) -> float:
    """Return a smallest scale. In other systems it may be None or 0."""
    return scale or SMALLEST_SCALE
