"""jmp: ``DynamicLossScale``."""

from typing import Any

from .._rules import fields
from ._build import Growing, build_rule, least_scale


def jmp_dynamic(
    loss_scale: Any,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> Growing:
    """Return the rule of ``jmp.DynamicLossScale``.

    Args:
        loss_scale: the first scale, from 2**-126 to 2**126.
        period: finite steps in a row before the scale grows.
        factor: the factor by which the scale grows and backs off, above 1.
        min_loss_scale: the smallest scale, 0 or more.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.jmp_dynamic(2.0**15, period=500).growth_interval
        500
    """
    return build_rule(
        init_scale=fields.scale("loss_scale", loss_scale),
        growth_interval=fields.growth_interval("period", period),
        min_scale=least_scale("min_loss_scale", min_loss_scale),
        growth_factor=fields.growth_factor("factor", factor),
    )
