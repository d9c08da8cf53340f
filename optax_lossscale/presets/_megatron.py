"""Megatron-LM: ``DynamicGradScaler``."""

from .._rules.dynamic import DynamicLossScale
from .._validation import check_order
from ._build import translated


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

    Returns:
        A `DynamicLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.megatron().hysteresis_refill
        'growth'
    """
    ours = translated(
        locals(),
        "init_scale floor growth_factor backoff_factor growth_interval hysteresis",
    )
    check_order(min_scale=ours["min_scale"], initial_scale=ours["init_scale"])
    return DynamicLossScale(**ours, hysteresis_refill="growth")
