"""Megatron-LM: ``DynamicGradScaler``."""

from .._dtypes import LARGEST_SCALE
from .._rules import fields
from .._rules.dynamic import DynamicLossScale
from .._validation import check_order
from ._build import least_scale


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Return the rule of Megatron-LM's ``DynamicGradScaler``.

    The first ``hysteresis - 1`` non-finite steps leave the scale unchanged. Each
    further one lowers it, until growth resets the hysteresis counter. They need not be
    consecutive: that is what Megatron-LM does, although it documents otherwise.

    Args:
        initial_scale: the first scale, from ``min_scale`` to 2**126.
        min_scale: the smallest scale, 0 or more.
        growth_factor: the factor by which the scale grows, above 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: how many non-finite steps it takes to back off.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.megatron().hysteresis_refill
        'growth'
    """
    initial_scale = fields.scale("initial_scale", initial_scale)
    min_scale = least_scale("min_scale", min_scale)
    check_order(min_scale=min_scale, initial_scale=initial_scale)
    return DynamicLossScale(
        initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=LARGEST_SCALE,
        hysteresis=hysteresis,
        hysteresis_refill="growth",
    )
