"""DeepSpeed: ``DynamicLossScaler``, and the ``"fp16"`` part of its configuration."""

from .._rules.arguments import (
    check_growth_interval,
    check_hysteresis,
)
from .._rules.fixed import FixedLossScale
from .._validation import check_bool, check_number
from ._build import Growing, factors, floor, growing


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

    The first ``delayed_shift - 1`` non-finite steps leave the scale, every further one
    divides it by ``scale_factor``, down to ``min_scale``, until the hysteresis counter
    is reset: by a growth, or with ``consecutive_hysteresis`` by any finite step. A
    growth comes every ``scale_window`` finite steps in a row, but the first one after
    the start or a non-finite step comes one step late, a slip of 2025 that is kept
    here; with ``first_growth_late=False`` the timing is that of the versions before.

    Departures: nothing is raised at ``min_scale``, where DeepSpeed stops by default:
    a compiled step cannot; `check_loss_scale` does, and ``raise_error_at_min_scale`` is
    accepted only because your configuration may have it. The ceiling is 2**126, where
    DeepSpeed has none. Gradients are divided by the scale that multiplied the loss,
    where DeepSpeed divides them by the next. The defaults are those of its
    configuration, for which there is `deepspeed_fp16`.

    Args:
        init_scale: the first scale. One below ``min_scale`` stays until an overflow
            raises it, as in DeepSpeed.
        scale_factor: what a growth multiplies by and a backoff divides by, above 1.
        scale_window: finite steps in a row before a growth.
        min_scale: the least scale, 0 or more; in effect 2**-126 or more.
        delayed_shift: non-finite steps that it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        raise_error_at_min_scale: taken and not used, as said above.
        first_growth_late: whether the first growth takes a finite step more.

    Returns:
        A `VerbatimLossScale`; a `DynamicLossScale` if the first growth is not late and
        ``init_scale`` is not below ``min_scale``.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.deepspeed(scale_window=2)
        >>> state = rule.init()
        >>> for _ in range(5):
        ...     state = rule.update(state, True)
        ...     print(float(state.loss_scale))
        65536.0
        65536.0
        131072.0
        131072.0
        262144.0

    References:
        `deepspeed/runtime/fp16/loss_scaler.py
        <https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/loss_scaler.py>`_
    """
    check_bool(
        "consecutive_hysteresis",
        consecutive_hysteresis,
        "It says whether any finite step resets the hysteresis counter.",
    )
    check_bool(
        "raise_error_at_min_scale",
        raise_error_at_min_scale,
        "Nothing is raised inside a step; `check_loss_scale` raises outside.",
    )
    return growing(
        init_scale=init_scale,
        min_scale=floor(min_scale, "min_scale"),
        **factors(scale_factor, "scale_factor"),
        growth_interval=check_growth_interval(scale_window, "scale_window"),
        hysteresis=check_hysteresis(delayed_shift, "delayed_shift"),
        hysteresis_refill="finite" if consecutive_hysteresis else "growth",
        first_growth_late=first_growth_late,
    )


def deepspeed_fp16(
    enabled: bool = True,
    loss_scale: float = 0.0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> Growing | FixedLossScale:
    """Return the rule that the ``"fp16"`` part of a DeepSpeed configuration means.

    A ``loss_scale`` other than 0 stays; with 0 the rule is that of `deepspeed`.

    Departures: those of `deepspeed`.

    Args:
        enabled: if False, nothing is scaled, and non-finite steps are skipped.
        loss_scale: 0, or the scale to keep, 1 or more.
        initial_scale_power: log2 of the first scale.
        loss_scale_window: finite steps in a row before a growth.
        hysteresis: non-finite steps that it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        min_loss_scale: the least scale, 0 or more; in effect 2**-126 or more.

    Returns:
        A `VerbatimLossScale` or a `FixedLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> config = {"fp16": {"enabled": True, "initial_scale_power": 12}}
        >>> presets.deepspeed_fp16(**config["fp16"]).init_scale
        4096.0

    References:
        `DeepSpeed, "FP16 training options"
        <https://www.deepspeed.ai/docs/config-json/#fp16-training-options>`_
    """
    check_bool("enabled", enabled, "It says whether to scale at all.")
    if not enabled:
        return FixedLossScale(1.0)
    if loss_scale:
        return FixedLossScale(loss_scale)
    power = check_number(
        "initial_scale_power",
        initial_scale_power,
        lambda x: -126 <= x <= 126,
        "a number from -126 to 126",
        "It is log2 of the first scale; 16 is usual.",
    )
    return deepspeed(
        init_scale=2.0**power,
        scale_window=check_growth_interval(loss_scale_window, "loss_scale_window"),
        delayed_shift=check_hysteresis(hysteresis),
        consecutive_hysteresis=consecutive_hysteresis,
        min_scale=floor(min_loss_scale, "min_loss_scale"),
    )
