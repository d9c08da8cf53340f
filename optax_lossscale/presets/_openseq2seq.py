"""OpenSeq2Seq: ``BackoffScaler`` and ``LogMaxScaler``."""

from .._rules.dynamic import DynamicLossScale
from .._rules.log_normal import LogNormalLossScale
from .._validation import check, check_number, check_order
from ._build import ceiling, factors, floor


def openseq2seq_backoff(
    scale_min: float = 1.0,
    scale_max: float = 2.0**24,
    step_factor: float = 2.0,
    step_window: int = 2000,
) -> DynamicLossScale:
    """Return the rule of OpenSeq2Seq's ``BackoffScaler``.

    The scale starts at ``scale_max``. It is multiplied by ``step_factor``, up to
    ``scale_max``, after every ``step_window`` finite steps in a row. It is divided by
    ``step_factor``, down to ``scale_min``, after every non-finite step.

    Departures: none.

    Args:
        scale_min: the smallest scale, 0 or more; values below 2**-126 mean 2**-126.
        scale_max: the first and largest scale; values above 2**126 mean 2**126.
        step_factor: the factor by which the scale grows and backs off, above 1.
        step_window: finite steps in a row before the scale grows.

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
        growth_interval=check("growth_interval", step_window, "step_window"),
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

    `LogNormalLossScale` explains how it works. Here the scale starts at 1 and need not
    be a power of two.

    A non-finite step counts as ``2**log_max`` instead of ``log_max``. This mistake of
    OpenSeq2Seq keeps the scale at ``scale_min`` for thousands of steps after the first
    overflow. `LogNormalLossScale` by itself does not have it.

    Departures: a step whose gradients are all zero leaves the scale unchanged; in
    OpenSeq2Seq the scale becomes NaN and stays NaN.

    Args:
        scale_min: the smallest scale, 0 or more; values below 2**-126 mean 2**-126.
        scale_max: the largest scale; values above 2**126 mean 2**126.
        log_max: the log2 that a non-finite step is meant to count as, up to 16.
        beta1: the decay of the mean, between 0 and 1.
        beta2: the decay of the standard deviation, between 0 and 1.
        overflow_std_dev: how many standard deviations to leave free below 2**16.

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
        "It is the log2 that a non-finite step is meant to count as; 16 is usual.",
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
