"""OpenSeq2Seq: ``BackoffScaler`` and ``LogMaxScaler``."""

from .._rules.dynamic import DynamicLossScale
from .._rules.log_normal import LogNormalLossScale
from ._build import translated


def openseq2seq_backoff(
    scale_min: float = 1.0,
    scale_max: float = 2.0**24,
    step_factor: float = 2.0,
    step_window: int = 2000,
) -> DynamicLossScale:
    """Return the rule of OpenSeq2Seq's ``BackoffScaler``.

    Args:
        scale_min: the smallest scale, 0 or more.
        scale_max: the first and largest scale.
        step_factor: the factor by which the scale grows and backs off, above 1.
        step_window: finite steps in a row before the scale grows.

    Returns:
        A `DynamicLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.openseq2seq_backoff(scale_max=2.0**14).init_scale
        16384.0
    """
    ours = translated(locals(), "floor ceiling factor growth_interval")
    return DynamicLossScale(init_scale=ours["max_scale"], **ours)


def openseq2seq_logmax(
    scale_min: float = 1.0,
    scale_max: float = 2.0**24,
    log_max: float = 16.0,
    beta1: float = 0.99,
    beta2: float = 0.999,
    overflow_std_dev: float = 3.09,
) -> LogNormalLossScale:
    """Return the rule of OpenSeq2Seq's ``LogMaxScaler``.

    The scale starts at 1 and need not be a power of two. A non-finite step counts as
    ``2**log_max``. This mistake of theirs then keeps the scale at ``scale_min``.

    Args:
        scale_min: the smallest scale, 0 or more.
        scale_max: the largest scale.
        log_max: the log2 that a non-finite step is meant to count as, up to 16.
        beta1: the decay of the mean, between 0 and 1.
        beta2: the decay of the standard deviation, between 0 and 1.
        overflow_std_dev: how many standard deviations to leave free below 2**16.

    Returns:
        A `LogNormalLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.openseq2seq_logmax().nonfinite_log
        65536.0
    """
    ours = translated(
        locals(), "floor ceiling log_max_of_float16 beta1 beta2 overflow_std_dev"
    )
    return LogNormalLossScale(
        init_scale=min(max(1.0, ours["min_scale"]), ours["max_scale"]),
        nonfinite_log=2.0 ** ours.pop("log_max_of_float16"),
        power_of_two=False,
        **ours,
    )
