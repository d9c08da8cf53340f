"""mpx: ``DynamicLossScaling``."""

from typing import Any

from ._build import Growing, growing


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

    Returns:
        A `DynamicLossScale` or `VerbatimLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mpx_dynamic(2.0**15).max_scale
        65504.0
    """
    return growing(
        locals(), "init_scale floor factor growth_interval", max_scale=65504.0
    )
