"""Apex: ``apex.amp``."""

from typing import Literal

from .._rules import fields
from .._rules.fixed import FixedLossScale
from .._validation import check_order
from ._build import Growing, build_rule, least_scale


def apex_amp(
    loss_scale: float | Literal["dynamic"] = "dynamic",
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Growing | FixedLossScale:
    """Return the rule of ``apex.amp``.

    The scale doubles after ``scale_window`` finite steps in a row and is halved after
    every non-finite step. An ``init_scale`` above ``max_loss_scale`` is lowered to it.

    Args:
        loss_scale: ``"dynamic"``, or a constant scale, 1 or more, that skips nothing.
        init_scale: the first scale, from 2**-126.
        scale_window: finite steps in a row before the scale grows.
        min_loss_scale: the smallest scale, or None.
        max_loss_scale: the largest scale, up to 2**126.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.apex_amp(loss_scale=128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)
    """
    if loss_scale != "dynamic":
        return FixedLossScale(loss_scale, skip_nonfinite=False)
    least = 0.0 if min_loss_scale is None else min_loss_scale
    least = least_scale("min_loss_scale", least)
    largest = fields.scale("max_loss_scale", max_loss_scale)
    check_order(min_loss_scale=least, max_loss_scale=largest)
    return build_rule(
        init_scale=min(fields.scale("init_scale", init_scale), largest),
        growth_interval=fields.growth_interval("scale_window", scale_window),
        min_scale=least,
        max_scale=largest,
    )
