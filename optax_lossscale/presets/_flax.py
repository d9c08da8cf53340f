"""Flax: ``flax.training.dynamic_scale.DynamicScale``."""

from .._dtypes import SMALLEST_SCALE
from .._rules import fields
from ._build import Growing, build_rule, least_scale


def flax_dynamic_scale(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> Growing:
    """Return the rule of ``flax.training.dynamic_scale.DynamicScale``.

    Flax grows the scale one step later than it documents, so the ``growth_interval`` of
    the rule is larger by 1.

    Args:
        growth_factor: the factor by which the scale grows, above 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the one that grows the scale.
        scale: the first scale, from 2**-126 to 2**126.
        minimum_scale: the smallest scale, 0 or more, or None.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.flax_dynamic_scale().growth_interval
        2001
    """
    minimum_scale = 0.0 if minimum_scale is None else minimum_scale
    return build_rule(
        init_scale=fields.scale("scale", scale),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=fields.growth_interval("growth_interval", growth_interval) + 1,
        min_scale=least_scale("minimum_scale", minimum_scale),
    )
