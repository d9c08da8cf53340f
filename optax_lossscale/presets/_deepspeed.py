"""DeepSpeed: ``DynamicLossScaler``, and the ``"fp16"`` part of its configuration."""

from .._dtypes import LARGEST_SCALE
from .._rules import fields
from .._rules.fixed import FixedLossScale
from .._validation import check_number, check_switch
from ._build import Growing, build_rule, least_scale


def deepspeed(
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
    first_growth_late: bool = True,
) -> Growing:
    """Return the rule of DeepSpeed's ``DynamicLossScaler`` (ZeRO).

    The first ``delayed_shift - 1`` non-finite steps leave the scale unchanged. Each
    further one lowers it, until growth resets the hysteresis counter. The first growth
    after the start or after a non-finite step comes one step late.

    Args:
        init_scale: the first scale, from 2**-126 to 2**126.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.
        min_scale: the smallest scale, 0 or more.
        delayed_shift: how many non-finite steps it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        raise_error_at_min_scale: ignored, because a compiled step cannot raise.
        first_growth_late: pass False for the timing of DeepSpeed before 2025.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.deepspeed(delayed_shift=3).hysteresis
        3
    """
    del raise_error_at_min_scale
    advice = "It decides what resets the hysteresis counter."
    check_switch("consecutive_hysteresis", consecutive_hysteresis, advice)
    return build_rule(
        init_scale=init_scale,
        growth_interval=fields.growth_interval("scale_window", scale_window),
        min_scale=least_scale("min_scale", min_scale),
        hysteresis=fields.hysteresis("delayed_shift", delayed_shift),
        hysteresis_refill="finite" if consecutive_hysteresis else "growth",
        first_growth_late=first_growth_late,
        growth_factor=fields.growth_factor("scale_factor", scale_factor),
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
) -> Growing | FixedLossScale:
    """Return the rule for the ``"fp16"`` section of a DeepSpeed configuration.

    With a ``loss_scale`` of 0, it is the rule of `deepspeed`.

    Args:
        enabled: if False, nothing is scaled. Non-finite steps are still skipped.
        loss_scale: 0, or a constant scale, 1 or more.
        initial_scale_power: log2 of the first scale.
        loss_scale_window: finite steps in a row before the scale grows.
        hysteresis: how many non-finite steps it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        min_loss_scale: the smallest scale, 0 or more.
        auto_cast: ignored, as the next one: neither concerns the scale.
        fp16_master_weights_and_grads: ignored.

    Examples:
        >>> from optax_lossscale import presets
        >>> config = {"fp16": {"enabled": True, "initial_scale_power": 12}}
        >>> presets.deepspeed_fp16(**config["fp16"]).init_scale
        4096.0
    """
    del auto_cast, fp16_master_weights_and_grads
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0)
    advice = "0 is for a scale that changes."
    if check_number("loss_scale", loss_scale, 0, LARGEST_SCALE, advice):
        return FixedLossScale(loss_scale)
    advice = "It is log2 of the first scale."
    power = check_number("initial_scale_power", initial_scale_power, -126, 126, advice)
    return deepspeed(
        init_scale=2.0**power,
        scale_window=fields.growth_interval("loss_scale_window", loss_scale_window),
        min_scale=least_scale("min_loss_scale", min_loss_scale),
        delayed_shift=fields.hysteresis("hysteresis", hysteresis),
        consecutive_hysteresis=consecutive_hysteresis,
    )
