"""mpx: ``DynamicLossScaling``."""

from typing import Any

from .._rules import fields
from ._build import Growing, build_rule, least_scale


def mpx_dynamic(
    loss_scaling: Any,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> Growing:
    """Return the rule of ``mpx.DynamicLossScaling``.

    It is the rule of `jmp_dynamic` with a maximum of 65504, the largest float16 number.

    Args:
        loss_scaling: the first scale, from 2**-126 to 2**126.
        min_loss_scaling: the smallest scale, from 0 to 65504.
        factor: the factor by which the scale grows and backs off, above 1.
        period: finite steps in a row before the scale grows.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mpx_dynamic(2.0**15).max_scale
        65504.0
    """
    largest = 65504.0
    return build_rule(
        init_scale=fields.scale("loss_scaling", loss_scaling),
        growth_interval=fields.growth_interval("period", period),
        min_scale=least_scale("min_loss_scaling", min_loss_scaling, largest),
        max_scale=largest,
        growth_factor=fields.growth_factor("factor", factor),
    )
