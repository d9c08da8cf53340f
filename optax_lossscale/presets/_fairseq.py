"""fairseq and its descendant metaseq: ``DynamicLossScaler``."""

import math
import operator
from collections.abc import Callable
from typing import Any

from .._precision import SMALLEST_SCALE
from .._rules.dynamic import DynamicLossScale
from .._rules.tolerant import TolerantLossScale
from .._validation import check, check_order
from ._build import translated


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> DynamicLossScale | TolerantLossScale:
    """Return the rule of fairseq's ``DynamicLossScaler``.

    The scale grows after ``scale_window`` finite steps since the last overflow. A
    non-finite step lowers it, if the share of non-finite steps since the scale last
    changed has reached ``tolerance``.

    Args:
        init_scale: the first scale, above ``min_loss_scale``.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.
        tolerance: the share of non-finite steps to tolerate, from 0 to 1.
        threshold: the smallest scale, or None.
        min_loss_scale: the scale stays above this number.

    Returns:
        A `DynamicLossScale`, or with a tolerance a `TolerantLossScale`. See
        `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.fairseq(tolerance=0.05).tolerance
        0.05
    """
    ours = _translated(**locals(), stays=operator.gt)
    if ours["tolerance"] > 0:
        return TolerantLossScale(**ours)
    del ours["tolerance"]
    return DynamicLossScale(**ours)


def metaseq(
    init_scale: float = 4.0,
    scale_factor: float = 2.0,
    scale_window: int = 256,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 2.0**-5,
) -> TolerantLossScale:
    """Return the rule of metaseq's ``DynamicLossScaler``.

    It is the rule of `fairseq`, except that the window is multiplied and divided along
    with the scale, and that the scale may reach ``min_loss_scale``.

    Args:
        init_scale: the first scale, ``min_loss_scale`` or more.
        scale_factor: the factor of the scale and the window, a whole number above 1.
        scale_window: finite steps in a row before the scale first grows.
        tolerance: the share of non-finite steps to tolerate, from 0 to 1.
        threshold: the smallest scale, or None.
        min_loss_scale: the scale does not fall below this number.

    Returns:
        A `TolerantLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.metaseq().interval_follows_scale
        True
    """
    ours = _translated(**locals(), stays=operator.ge)
    check("whole_factor", scale_factor, "scale_factor")
    return TolerantLossScale(**ours, interval_follows_scale=True)


def _translated(
    threshold: Any, stays: Callable[[float, float], bool], **theirs: Any
) -> dict[str, Any]:
    """Translate what both have in common, with the smallest scale that is reached.

    A backoff is undone unless ``stays(scale, min_loss_scale)``.
    """
    names = "init_scale factor growth_interval tolerance floor"
    ours = translated(theirs, names)
    init_scale, factor = ours["init_scale"], ours["growth_factor"]
    lowest = ours["min_scale"]
    if lowest == SMALLEST_SCALE:  # theirs is usually lower
        stays = operator.ge
    # As many backoffs as fit; rounding may leave this one off.
    backoffs = math.floor(math.log(init_scale / lowest, factor))
    near = [init_scale / factor**n for n in range(backoffs - 1, backoffs + 2)]
    ours["min_scale"] = min([init_scale, *(x for x in near if stays(x, lowest))])
    if threshold is not None:
        threshold = max(check("floor", threshold, "threshold"), SMALLEST_SCALE)
        if stays(threshold, lowest):
            check_order(threshold=threshold, init_scale=init_scale)
            ours["min_scale"] = threshold
    return ours
