"""metaseq: ``DynamicLossScaler``."""

from .._rules.tolerant import TolerantLossScale
from .._validation import check_count
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

    It is the rule of `fairseq` with two differences. The window is multiplied and
    divided along with the scale. At ``min_loss_scale`` the scale stays as it is, and
    nothing is raised.

    Departures: the maximum is 2**126; metaseq has none.

    Args:
        init_scale: the first scale, ``min_loss_scale`` or more.
        scale_factor: the factor by which the scale and the window change, a whole
            number above 1, up to 2147483647.
        scale_window: finite steps in a row before the scale first grows.
        tolerance: the share of non-finite steps to tolerate, from 0 to 1.
        threshold: the smallest scale, or None.
        min_loss_scale: the scale does not fall below this number.

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
    advice = "It multiplies the scale and a number of steps; 2 is usual."
    check_count("scale_factor", scale_factor, advice, least=2)
    arguments = fairseq_arguments(
        init_scale, scale_factor, scale_window, threshold, min_loss_scale, strict=False
    )
    return TolerantLossScale(
        **arguments, tolerance=tolerance, interval_follows_scale=True
    )
