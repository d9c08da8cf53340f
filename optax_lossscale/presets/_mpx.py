"""mpx: ``DynamicLossScaling``."""

from typing import Any

from .._precision import SMALLEST_SCALE
from .._validation import check, check_number
from ._build import Growing, factors, growing

_LARGEST_HALF = 65504.0


def mpx_dynamic(
    loss_scaling: Any,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> Growing:
    """Return the rule of ``mpx.DynamicLossScaling``.

    It is the rule of `jmp_dynamic` with a maximum of 65504, the largest float16 number,
    which is not a power of two.

    Departures: gradients are divided by the scale that multiplied the loss; mpx divides
    them by the next one, which halves them in every step that grows the scale. The loss
    is multiplied in float32 or wider; mpx rounds the scale to float16.

    Args:
        loss_scaling: the first scale, from 2**-126 to 2**126. If it is outside the
            limits, the first step clips it, as in mpx.
        min_loss_scaling: the smallest scale, from 0 to 65504; values below 2**-126 mean
            2**-126.
        factor: the factor by which the scale grows and backs off, above 1.
        period: finite steps in a row before the scale grows.

    Returns:
        A `DynamicLossScale`, or a `VerbatimLossScale` if ``loss_scaling`` is outside
        the limits.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mpx_dynamic(2.0**15).max_scale
        65504.0

    References:
        `mixed_precision_for_JAX
        <https://github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX>`_
    """
    lowest = check_number(
        "min_loss_scaling",
        min_loss_scaling,
        lambda x: 0 <= x <= _LARGEST_HALF,
        "a number from 0 to 65504",
        "It is the smallest loss scale; 1 is usual.",
    )
    return growing(
        init_scale=check("init_scale", loss_scaling, "loss_scaling"),
        **factors(factor, "factor"),
        growth_interval=check("growth_interval", period, "period"),
        min_scale=max(lowest, SMALLEST_SCALE),
        max_scale=_LARGEST_HALF,
        clips_every_step=True,
    )
