"""metaseq: ``DynamicLossScaler``."""

from .._precision import LARGEST_SCALE
from .._rules.tolerant import TolerantLossScale
from .._validation import check_number
from ._fairseq import fairseq_arguments


def metaseq(
    init_scale: float = 4.0,
    scale_factor: float = 2.0,
    scale_window: int = 256,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 2.0**-5,
) -> TolerantLossScale:
    """Return the rule of metaseq's ``DynamicLossScaler``.

    That of `fairseq`, but the window is multiplied and divided along with the scale,
    and at ``min_loss_scale`` the scale stays and nothing is raised.

    Departures: the ceiling is 2**126, where metaseq has none.

    Args:
        init_scale: the first scale, ``min_loss_scale`` or above.
        scale_factor: what a growth multiplies by and a backoff divides by, a whole
            number above 1.
        scale_window: finite steps in a row before the first growth.
        tolerance: the share of non-finite steps that is tolerated, from 0 to 1.
        threshold: the least scale, or None.
        min_loss_scale: the scale does not fall below it.

    Returns:
        A `TolerantLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.metaseq().interval_follows_scale
        True

    References:
        `metaseq/optim/dynamic_loss_scaler.py
        <https://github.com/facebookresearch/metaseq/blob/main/metaseq/optim/dynamic_loss_scaler.py>`_
    """
    check_number(
        "scale_factor",
        scale_factor,
        lambda x: 1 < x <= LARGEST_SCALE and float(x).is_integer(),
        "a whole number above 1, up to 2**126",
        "It multiplies the scale and a number of steps; 2 is usual.",
    )
    arguments = fairseq_arguments(
        init_scale, scale_factor, scale_window, threshold, min_loss_scale, strict=False
    )
    return TolerantLossScale(
        **arguments, tolerance=tolerance, interval_follows_scale=True
    )
