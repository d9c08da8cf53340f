"""fairseq: ``DynamicLossScaler``."""

import math
from typing import Any

from .._precision import LARGEST_SCALE
from .._rules.arguments import (
    check_growth_factor,
    check_growth_interval,
    check_init_scale,
    check_normal_scale,
    check_order,
)
from .._rules.dynamic import DynamicLossScale
from .._rules.tolerant import TolerantLossScale
from ._build import floor


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> DynamicLossScale | TolerantLossScale:
    """Return the rule of fairseq's ``DynamicLossScaler``.

    The scale is multiplied by ``scale_factor`` at every ``scale_window``-th finite step
    since the last overflow. A non-finite step divides it, down to ``threshold``, if
    the share of non-finite steps since the last change of the scale has come to
    ``tolerance``.

    Departures: at ``min_loss_scale`` fairseq raises FloatingPointError and keeps the
    scale it had; here it stays there, and `check_loss_scale` raises. The ceiling is
    2**126, where fairseq has none.

    Args:
        init_scale: the first scale, above ``min_loss_scale``.
        scale_factor: what a growth multiplies by and a backoff divides by, above 1.
        scale_window: finite steps in a row before a growth.
        tolerance: the share of non-finite steps that is tolerated, from 0 to 1.
        threshold: the least scale, or None.
        min_loss_scale: what the scale stays above.

    Returns:
        A `DynamicLossScale`, or with a ``tolerance`` a `TolerantLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.fairseq().min_scale > 1e-4
        True
        >>> presets.fairseq(tolerance=0.05).tolerance
        0.05

    References:
        `fairseq/optim/dynamic_loss_scaler.py
        <https://github.com/facebookresearch/fairseq/blob/main/fairseq/optim/dynamic_loss_scaler.py>`_
    """
    arguments = fairseq_arguments(
        init_scale, scale_factor, scale_window, threshold, min_loss_scale, strict=True
    )
    if tolerance == 0 and not isinstance(tolerance, bool):
        return DynamicLossScale(**arguments)
    return TolerantLossScale(**arguments, tolerance=tolerance)


def fairseq_arguments(
    init_scale: float,
    scale_factor: float,
    scale_window: int,
    threshold: float | None,
    min_loss_scale: float,
    strict: bool,
) -> dict[str, Any]:
    """Translate what fairseq and metaseq share.

    A backoff that would come to ``min_loss_scale`` (``strict``) or below it is undone,
    so the floor is the least scale on the way down from the first one.
    """
    scale_factor = check_growth_factor(scale_factor, "scale_factor")
    init_scale = check_init_scale(init_scale)
    lowest = floor(min_loss_scale, "min_loss_scale")
    strict = strict and lowest == min_loss_scale

    def undone(scale: float) -> bool:
        return scale < lowest or (strict and scale == lowest)

    # As many backoffs as fit, but for rounding.
    backoffs = math.log(init_scale / lowest) // math.log(scale_factor)
    min_scale = init_scale / scale_factor ** max(backoffs, 0)
    if undone(min_scale) and min_scale < init_scale:
        min_scale *= scale_factor
    if not undone(min_scale / scale_factor):
        min_scale /= scale_factor
    min_scale = min(min_scale, init_scale)
    if threshold is not None and not undone(floor(threshold, "threshold")):
        advice = "It is the least loss scale; leave it out for `min_loss_scale` alone."
        min_scale = check_normal_scale(threshold, "threshold", advice)
        check_order(threshold=min_scale, init_scale=init_scale)
    return {
        "init_scale": init_scale,
        "growth_factor": scale_factor,
        "backoff_factor": 1 / scale_factor,
        "growth_interval": check_growth_interval(scale_window, "scale_window"),
        "min_scale": min_scale,
        "max_scale": LARGEST_SCALE,
    }
