"""Apex: ``apex.amp``."""

from typing import Literal, overload

from .._rules.arguments import check_growth_interval, check_init_scale, check_order
from .._rules.fixed import FixedLossScale
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

    The scale doubles at every ``scale_window``-th finite step in a row, up to
    ``max_loss_scale``, and is halved at every non-finite step, down to
    ``min_loss_scale``.
    An ``init_scale`` above ``max_loss_scale`` is lowered to it. A number for
    ``loss_scale`` stays, and no step is skipped.

    Departures: without a ``min_loss_scale`` the floor is 2**-126, where Apex goes on to
    0 and divides by it. ``scale_factor``, which Apex takes and does not use, is not
    taken. Apex with ``num_losses`` is a rule and a state for each loss: see the README.

    Args:
        loss_scale: ``"dynamic"``, or the number to keep, 1 or more.
        init_scale: the first scale, from 2**-126.
        scale_window: finite steps in a row before a growth.
        min_loss_scale: the least scale, or None.
        max_loss_scale: the largest scale; in effect 2**126 or less.

    Returns:
        A `DynamicLossScale`, or a `FixedLossScale` that skips nothing; a
        `VerbatimLossScale` where ``init_scale`` is below ``min_loss_scale``.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.apex_amp(init_scale=2.0**30).init_scale == 2.0**24
        True
        >>> presets.apex_amp(loss_scale=128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)

    References:
        `apex/amp/scaler.py at 25.04
        <https://github.com/NVIDIA/apex/blob/25.04/apex/amp/scaler.py>`_; the module was
        removed in 2025
    """
    if loss_scale != "dynamic":
        return FixedLossScale(loss_scale, skip_nonfinite=False)
    if min_loss_scale is None:
        min_loss_scale = 0.0
    lowest = floor(min_loss_scale, "min_loss_scale")
    highest = ceiling(max_loss_scale, "max_loss_scale")
    check_order(min_loss_scale=lowest, max_loss_scale=highest)
    return growing(
        init_scale=min(check_init_scale(init_scale), highest),
        growth_interval=check_growth_interval(scale_window, "scale_window"),
        min_scale=lowest,
        max_scale=highest,
    )
