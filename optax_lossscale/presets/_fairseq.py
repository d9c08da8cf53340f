"""fairseq: ``DynamicLossScaler``."""

import math

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from .._rules import fields
from .._rules.dynamic import DynamicLossScale
from .._validation import check_order
from ._build import least_scale


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> DynamicLossScale:
    """Return the rule of fairseq's ``DynamicLossScaler``.

    The scale grows after ``scale_window`` finite steps since the last overflow.

    Args:
        init_scale: the first scale, above ``min_loss_scale``.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.
        threshold: the smallest scale, or None.
        min_loss_scale: the scale stays above this number.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.fairseq(min_loss_scale=1.0).min_scale
        2.0
    """
    init_scale = fields.scale("init_scale", init_scale)
    factor = fields.growth_factor("scale_factor", scale_factor)
    lowest = least_scale("min_loss_scale", min_loss_scale)

    def stays(scale: float) -> bool:
        # fairseq undoes a backoff to ``min_loss_scale`` or below. A smallest scale of
        # 0 means 2**-126 here, which is allowed itself.
        return scale > lowest or lowest == SMALLEST_SCALE == scale

    # The number of backoffs that stay above it, or one more or less, by rounding.
    backoffs = math.floor(math.log(init_scale / lowest, factor))
    near = [init_scale / factor**n for n in range(backoffs - 1, backoffs + 2)]
    min_scale = min([init_scale, *filter(stays, near)])
    if threshold is not None and stays(least := least_scale("threshold", threshold)):
        check_order(threshold=least, init_scale=init_scale)
        min_scale = least
    return DynamicLossScale(
        init_scale,
        growth_interval=fields.growth_interval("scale_window", scale_window),
        min_scale=min_scale,
        max_scale=LARGEST_SCALE,
        growth_factor=factor,
        backoff_factor=1 / factor,
    )
