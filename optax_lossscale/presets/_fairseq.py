"""fairseq: ``DynamicLossScaler``."""

import math
from typing import Any

from .._precision import LARGEST_SCALE
from .._rules.dynamic import DynamicLossScale
from .._rules.tolerant import TolerantLossScale
from .._validation import check, check_normal_scale, check_order
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

    The scale is multiplied by ``scale_factor`` after every ``scale_window`` finite
    steps since the last overflow. A non-finite step divides it by ``scale_factor``,
    down to ``threshold``, if the share of non-finite steps since the scale last changed
    has reached ``tolerance``.

    Departures: when the scale would reach ``min_loss_scale``, fairseq keeps it and
    raises FloatingPointError. Here the scale is kept and nothing is raised; use
    `check_loss_scale`. The maximum is 2**126; fairseq has none.

    Args:
        init_scale: the first scale, above ``min_loss_scale``.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.
        tolerance: the share of non-finite steps to tolerate, from 0 to 1.
        threshold: the smallest scale, or None.
        min_loss_scale: the scale stays above this number.

    Returns:
        A `DynamicLossScale`, or a `TolerantLossScale` if ``tolerance`` is not 0.

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
    """Translate the arguments that fairseq and metaseq share.

    A backoff to below ``min_loss_scale``, or with ``strict`` to it, is undone. So the
    minimum is the smallest scale that can be reached from the first one.
    """
    scale_factor = check("growth_factor", scale_factor, "scale_factor")
    init_scale = check("init_scale", init_scale)
    lowest = floor(min_loss_scale, "min_loss_scale")
    strict = strict and lowest == min_loss_scale

    def undone(scale: float) -> bool:
        return scale < lowest or (strict and scale == lowest)

    # As many backoffs as fit; rounding may leave this one off.
    backoffs = math.log(init_scale / lowest) // math.log(scale_factor)
    min_scale = init_scale / scale_factor ** max(backoffs, 0)
    if undone(min_scale) and min_scale < init_scale:
        min_scale *= scale_factor
    if not undone(min_scale / scale_factor):
        min_scale /= scale_factor
    min_scale = min(min_scale, init_scale)
    if threshold is not None and not undone(floor(threshold, "threshold")):
        advice = "It is the smallest loss scale; None leaves only `min_loss_scale`."
        min_scale = check_normal_scale("threshold", threshold, advice)
        check_order(threshold=min_scale, init_scale=init_scale)
    return {
        "init_scale": init_scale,
        "growth_factor": scale_factor,
        "backoff_factor": 1 / scale_factor,
        "growth_interval": check("growth_interval", scale_window, "scale_window"),
        "min_scale": min_scale,
        "max_scale": LARGEST_SCALE,
    }
