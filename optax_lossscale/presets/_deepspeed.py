"""DeepSpeed: ``DynamicLossScaler``, and the ``"fp16"`` part of its configuration."""

from .._rules.fixed import FixedLossScale
from .._validation import check
from ._build import Growing, growing


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

    Returns:
        A `VerbatimLossScale` or `DynamicLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.deepspeed(delayed_shift=3).hysteresis
        3
    """
    check("raise_error_at_min_scale", raise_error_at_min_scale)
    consecutive = check("consecutive_hysteresis", consecutive_hysteresis)
    refill = "finite" if consecutive else "growth"
    del raise_error_at_min_scale, consecutive_hysteresis, consecutive
    return growing(
        locals(),
        "init_scale factor growth_interval floor hysteresis first_growth_late "
        "hysteresis_refill",
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

    Returns:
        A `VerbatimLossScale` or a `FixedLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> config = {"fp16": {"enabled": True, "initial_scale_power": 12}}
        >>> presets.deepspeed_fp16(**config["fp16"]).init_scale
        4096.0
    """
    if not check("enabled", enabled):
        return FixedLossScale(1.0)
    if check("constant_or_0", loss_scale, "loss_scale"):
        return FixedLossScale(loss_scale)
    return deepspeed(
        init_scale=2.0 ** check("initial_scale_power", initial_scale_power),
        scale_window=check("growth_interval", loss_scale_window, "loss_scale_window"),
        min_scale=check("floor", min_loss_scale, "min_loss_scale"),
        delayed_shift=check("hysteresis", hysteresis),
        consecutive_hysteresis=consecutive_hysteresis,
    )
