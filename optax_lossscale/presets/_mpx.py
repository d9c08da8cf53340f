"""mpx: ``DynamicLossScaling``."""

from typing import Any

from .._precision import SMALLEST_SCALE
from .._rules.arguments import (
    check_growth_interval,
    check_init_scale,
)
from .._validation import check_number
from ._build import Growing, factors, growing

_LARGEST_HALF = 65504.0


def mpx_dynamic(
    loss_scaling: Any,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> Growing:
    """Return the rule of ``mpx.DynamicLossScaling``.

    It is the rule of `jmp_dynamic` with a ceiling of 65504, the largest float16, which
    is no power of two.

    Departures: gradients are divided by the scale that multiplied the loss, where mpx
    divides them by the next, and halves them in every growth step. The loss is
    multiplied in float32 or wider, where mpx rounds the scale to float16.

    Args:
        loss_scaling: the first scale, from 2**-126 to 2**126. One outside the limits
            comes inside with the first step, as in mpx.
        min_loss_scaling: the least scale, from 0 to 65504; in effect 2**-126 or more.
        factor: what a growth multiplies by and a backoff divides by, above 1.
        period: finite steps in a row before a growth.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale outside the
        limits.

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
        "It is the least loss scale; 1 is usual.",
    )
    return growing(
        init_scale=check_init_scale(loss_scaling, "loss_scaling"),
        **factors(factor, "factor"),
        growth_interval=check_growth_interval(period, "period"),
        min_scale=max(lowest, SMALLEST_SCALE),
        max_scale=_LARGEST_HALF,
        clips_every_step=True,
    )
