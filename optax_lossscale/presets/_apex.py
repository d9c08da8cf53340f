"""Apex: ``apex.amp``."""

from typing import Literal, overload

from .._rules.fixed import FixedLossScale
from .._validation import check, check_order
from ._build import Growing, ceiling, floor, growing


@overload
def apex_amp(
    loss_scale: Literal["dynamic"] = ...,
    init_scale: float = ...,
    scale_window: int = ...,
    min_loss_scale: float | None = ...,
    max_loss_scale: float = ...,
) -> Growing: ...


@overload
def apex_amp(
    loss_scale: float,
    init_scale: float = ...,
    scale_window: int = ...,
    min_loss_scale: float | None = ...,
    max_loss_scale: float = ...,
) -> FixedLossScale: ...


def apex_amp(
    loss_scale: float | Literal["dynamic"] = "dynamic",
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Growing | FixedLossScale:
    """Return the rule of ``apex.amp``.

    The scale is doubled after every ``scale_window`` finite steps in a row, up to
    ``max_loss_scale``. It is halved after every non-finite step, down to
    ``min_loss_scale``. An ``init_scale`` above ``max_loss_scale`` is lowered to it.

    If ``loss_scale`` is a number, the scale is constant and no step is skipped.

    Departures: without a ``min_loss_scale``, the minimum is 2**-126; Apex lowers the
    scale to 0 and divides by it. Apex's ``scale_factor``, which it ignores, is not an
    argument here. For Apex with ``num_losses``, use one rule and one state per loss:
    see the guide to several losses.

    Args:
        loss_scale: ``"dynamic"``, or a constant scale, 1 or more.
        init_scale: the first scale, from 2**-126.
        scale_window: finite steps in a row before the scale grows.
        min_loss_scale: the smallest scale, or None.
        max_loss_scale: the largest scale; values above 2**126 mean 2**126.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` if ``init_scale`` is below
        ``min_loss_scale``; or a `FixedLossScale` that skips nothing if ``loss_scale``
        is a number.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.apex_amp(init_scale=2.0**30).init_scale == 2.0**24
        True
        >>> presets.apex_amp(loss_scale=128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)

    References:
        `apex/amp/scaler.py of 25.04
        <https://github.com/NVIDIA/apex/blob/25.04/apex/amp/scaler.py>`_ (the module was
        removed in 2025)
    """
    if loss_scale != "dynamic":
        return FixedLossScale(loss_scale, skip_nonfinite=False)
    if min_loss_scale is None:
        min_loss_scale = 0.0
    lowest = floor(min_loss_scale, "min_loss_scale")
    highest = ceiling(max_loss_scale, "max_loss_scale")
    check_order(min_loss_scale=lowest, max_loss_scale=highest)
    return growing(
        init_scale=min(check("init_scale", init_scale), highest),
        growth_interval=check("growth_interval", scale_window, "scale_window"),
        min_scale=lowest,
        max_scale=highest,
    )
