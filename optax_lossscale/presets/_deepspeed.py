"""DeepSpeed: ``DynamicLossScaler``, and the ``"fp16"`` part of its configuration."""

from .._rules.fixed import FixedLossScale
from .._validation import check, check_bool, check_number
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

    The first ``delayed_shift - 1`` non-finite steps leave the scale unchanged. Each
    further one divides it by ``scale_factor``, down to ``min_scale``, until the
    hysteresis counter is reset. Growth resets it, and with ``consecutive_hysteresis``
    any finite step does.

    The scale grows after every ``scale_window`` finite steps in a row. The first growth
    after the start or after a non-finite step comes one step late, as in DeepSpeed
    since 2025. For the timing of earlier versions, pass ``first_growth_late=False``.

    The defaults are those of DeepSpeed's configuration. To pass a configuration, use
    `deepspeed_fp16`.

    Departures: DeepSpeed raises an error at ``min_scale`` by default. A compiled step
    cannot raise, so this rule does not; use `check_loss_scale`. The argument
    ``raise_error_at_min_scale`` is accepted because your configuration may contain it.
    The maximum is 2**126; DeepSpeed has none. Gradients are divided by the scale that
    multiplied the loss; DeepSpeed divides them by the next one.

    Args:
        init_scale: the first scale. If it is below ``min_scale``, it stays until an
            overflow raises it, as in DeepSpeed.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.
        min_scale: the smallest scale, 0 or more; values below 2**-126 mean 2**-126.
        delayed_shift: how many non-finite steps it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        raise_error_at_min_scale: accepted and ignored, as described above.
        first_growth_late: whether the first growth takes one more finite step.

    Returns:
        A `VerbatimLossScale`, or a `DynamicLossScale` if ``first_growth_late`` is False
        and ``init_scale`` is not below ``min_scale``.

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
        "It decides whether any finite step resets the hysteresis counter.",
    )
    check_bool(
        "raise_error_at_min_scale",
        raise_error_at_min_scale,
        "It is ignored: a compiled step cannot raise. Use `check_loss_scale`.",
    )
    return growing(
        init_scale=init_scale,
        min_scale=floor(min_scale, "min_scale"),
        **factors(scale_factor, "scale_factor"),
        growth_interval=check("growth_interval", scale_window, "scale_window"),
        hysteresis=check("hysteresis", delayed_shift, "delayed_shift"),
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
    """Return the rule for the ``"fp16"`` section of a DeepSpeed configuration.

    With a ``loss_scale`` of 0, it is the rule of `deepspeed`. Any other number is a
    constant scale.

    Departures: those of `deepspeed`.

    Args:
        enabled: if False, nothing is scaled. Non-finite steps are still skipped.
        loss_scale: 0, or a constant scale, 1 or more.
        initial_scale_power: log2 of the first scale.
        loss_scale_window: finite steps in a row before the scale grows.
        hysteresis: how many non-finite steps it takes to back off.
        consecutive_hysteresis: whether any finite step resets the hysteresis counter.
        min_loss_scale: the smallest scale, 0 or more; values below 2**-126 mean
            2**-126.

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
    check_bool("enabled", enabled, "It decides whether to scale the loss.")
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
        scale_window=check("growth_interval", loss_scale_window, "loss_scale_window"),
        delayed_shift=check("hysteresis", hysteresis),
        consecutive_hysteresis=consecutive_hysteresis,
        min_scale=floor(min_loss_scale, "min_loss_scale"),
    )
