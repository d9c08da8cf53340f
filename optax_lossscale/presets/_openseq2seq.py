"""OpenSeq2Seq: ``BackoffScaler`` and ``LogMaxScaler``."""

from .._rules.arguments import (
    check_growth_interval,
    check_order,
)
from .._rules.dynamic import DynamicLossScale
from .._rules.log_normal import LogNormalLossScale
from .._validation import check_number
from ._build import ceiling, factors, floor


def openseq2seq_backoff(
    scale_min: float = 1.0,
    scale_max: float = 2.0**24,
    step_factor: float = 2.0,
    step_window: int = 2000,
) -> DynamicLossScale:
    """Return the rule of OpenSeq2Seq's ``BackoffScaler``.

    The scale starts at ``scale_max``. It is multiplied by ``step_factor`` at every
    ``step_window``-th finite step in a row, up to ``scale_max``, and divided by it,
    down to ``scale_min``, at every non-finite step.

    Departures: none.

    Args:
        scale_min: the least scale, 0 or more; in effect 2**-126 or more.
        scale_max: the largest scale and the first one; in effect 2**126 or less.
        step_factor: what a growth multiplies by and a backoff divides by, above 1.
        step_window: finite steps in a row before a growth.

    Returns:
        A `DynamicLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.openseq2seq_backoff(scale_max=2.0**14).init_scale
        16384.0

    References:
        `open_seq2seq/optimizers/automatic_loss_scaler.py
        <https://github.com/NVIDIA/OpenSeq2Seq/blob/master/open_seq2seq/optimizers/automatic_loss_scaler.py>`_
    """
    lowest, highest = floor(scale_min, "scale_min"), ceiling(scale_max, "scale_max")
    check_order(scale_min=lowest, scale_max=highest)
    return DynamicLossScale(
        init_scale=highest,
        min_scale=lowest,
        max_scale=highest,
        **factors(step_factor, "step_factor"),
        growth_interval=check_growth_interval(step_window, "step_window"),
    )


def openseq2seq_logmax(
    scale_min: float = 1.0,
    scale_max: float = 2.0**24,
    log_max: float = 16.0,
    beta1: float = 0.99,
    beta2: float = 0.999,
    overflow_std_dev: float = 3.09,
) -> LogNormalLossScale:
    """Return the rule of OpenSeq2Seq's ``LogMaxScaler``.

    See `LogNormalLossScale`. The scale starts at 1 and need not be a power of two. A
    non-finite step counts as 2**``log_max`` where it should count as ``log_max``, a
    slip that keeps the scale at ``scale_min`` for thousands of steps after the first
    overflow; `LogNormalLossScale` itself does not have it.

    Departures: a step whose gradients are all zero leaves the scale alone, where it
    becomes NaN in OpenSeq2Seq and remains so.

    Args:
        scale_min: the least scale, 0 or more; in effect 2**-126 or more.
        scale_max: the largest scale; in effect 2**126 or less.
        log_max: log2 of what a non-finite step is meant to count as, up to 16.
        beta1: the decay of the mean, between 0 and 1.
        beta2: the decay of the deviation, between 0 and 1.
        overflow_std_dev: how many deviations stay free below 2**16.

    Returns:
        A `LogNormalLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.openseq2seq_logmax().nonfinite_log
        65536.0

    References:
        `open_seq2seq/optimizers/automatic_loss_scaler.py
        <https://github.com/NVIDIA/OpenSeq2Seq/blob/master/open_seq2seq/optimizers/automatic_loss_scaler.py>`_
    """
    log_max = check_number(
        "log_max",
        log_max,
        lambda x: -126 <= x <= 16,
        "a number from -126 to 16",
        "It is log2 of what a non-finite step is meant to count as; 16 is usual.",
    )
    lowest, highest = floor(scale_min, "scale_min"), ceiling(scale_max, "scale_max")
    check_order(scale_min=lowest, scale_max=highest)
    return LogNormalLossScale(
        init_scale=min(max(1.0, lowest), highest),
        min_scale=lowest,
        max_scale=highest,
        beta1=beta1,
        beta2=beta2,
        overflow_std_dev=overflow_std_dev,
        nonfinite_log=2.0**log_max,
        power_of_two=False,
    )
