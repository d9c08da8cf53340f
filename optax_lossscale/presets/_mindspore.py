"""MindSpore: ``DynamicLossScaleManager``."""

from .._rules import fields
from ._build import Growing, build_rule


def mindspore_dynamic(
    init_loss_scale: float = 2.0**24,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> Growing:
    """Return the rule of MindSpore's ``DynamicLossScaleManager``.

    ``DynamicLossScaleUpdateCell`` and ``amp.DynamicLossScaler`` follow the same rule.
    The smallest scale is 1.

    Args:
        init_loss_scale: the first scale, from 1 to 2**126.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mindspore_dynamic().init_scale
        16777216.0
    """
    return build_rule(
        init_scale=fields.constant_scale("init_loss_scale", init_loss_scale),
        growth_interval=fields.growth_interval("scale_window", scale_window),
        min_scale=1.0,
        growth_factor=fields.growth_factor("scale_factor", scale_factor),
    )
