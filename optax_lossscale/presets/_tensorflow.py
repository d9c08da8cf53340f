"""TensorFlow and ``tf.contrib``: loss scales and loss-scale managers."""

from .._rules.fixed import FixedLossScale
from .._validation import check
from ._build import Growing, factors, growing


def tf_dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> Growing:
    """Return the rule of TensorFlow's ``DynamicLossScale``.

    The scale is multiplied by ``multiplier`` after every ``increment_period`` finite
    steps in a row. It is divided by ``multiplier``, down to 1, after every non-finite
    step.

    Departures: the maximum is 2**126; in TensorFlow it is the largest float32, whose
    reciprocal is flushed to zero.

    Args:
        initial_loss_scale: the first scale. If it is below 1, it stays until an
            overflow raises it to 1, as in TensorFlow.
        increment_period: finite steps in a row before the scale grows.
        multiplier: the factor by which the scale grows and backs off, above 1.

    Returns:
        A `DynamicLossScale`, or a `VerbatimLossScale` if ``initial_loss_scale`` is
        below 1.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.tf_dynamic_loss_scale(multiplier=4.0)
        >>> rule.init_scale, rule.growth_factor, rule.backoff_factor, rule.min_scale
        (32768.0, 4.0, 0.25, 1.0)

    References:
        `tf.compat.v1.mixed_precision.DynamicLossScale
        <https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/DynamicLossScale>`_
    """
    return growing(
        init_scale=check("init_scale", initial_loss_scale, "initial_loss_scale"),
        growth_interval=check("growth_interval", increment_period, "increment_period"),
        **factors(multiplier, "multiplier"),
        min_scale=1.0,
    )


def tf_fixed_loss_scale(loss_scale_value: float) -> FixedLossScale:
    """Return the rule of TensorFlow's ``FixedLossScale``.

    The scale is constant, and every step is applied, even if its gradients are not
    finite. To skip non-finite steps, use ``FixedLossScale(value)``.

    Departures: none.

    Args:
        loss_scale_value: the scale, 1 or more.

    Returns:
        A `FixedLossScale` that skips nothing.

    Raises:
        ValueError: if the scale is below 1 or not a number.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_fixed_loss_scale(128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)

    References:
        `tf.compat.v1.mixed_precision.FixedLossScale
        <https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/FixedLossScale>`_
    """
    scale = check("loss_scale", loss_scale_value, "loss_scale_value")
    return FixedLossScale(scale, skip_nonfinite=False)


def tf_contrib_fixed(loss_scale: float) -> FixedLossScale:
    """Return the rule of ``tf.contrib.mixed_precision.FixedLossScaleManager``.

    The scale is constant, and non-finite steps are skipped.

    Departures: none.

    Args:
        loss_scale: the scale, 1 or more.

    Returns:
        A `FixedLossScale`.

    Raises:
        ValueError: if the scale is below 1 or not a number.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_contrib_fixed(128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=True)

    References:
        `tensorflow/contrib/mixed_precision of 1.15
        <https://github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/contrib/mixed_precision/python/loss_scale_manager.py>`_
    """
    return FixedLossScale(loss_scale)


def tf_contrib_exponential_update(
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> Growing:
    """Return the rule of ``ExponentialUpdateLossScaleManager`` in ``tf.contrib``.

    The scale is multiplied by ``incr_ratio`` after every ``incr_every_n_steps`` finite
    steps in a row. It is multiplied by ``decr_ratio``, down to 1, after every
    ``decr_every_n_nan_or_inf`` non-finite steps. These are counted across finite steps,
    and any change of the scale resets the count.

    With the default ``decr_ratio``, the scale does not stay a power of two, so
    unscaling rounds. With 0.5 it is exact.

    Departures: the maximum is 2**126; in ``tf.contrib`` it is the largest float32.

    Args:
        init_loss_scale: the first scale. If it is below 1, it stays until an overflow
            raises it to 1, as in ``tf.contrib``.
        incr_every_n_steps: finite steps in a row before the scale grows.
        decr_every_n_nan_or_inf: how many non-finite steps it takes to back off.
        incr_ratio: the factor by which the scale grows, above 1.
        decr_ratio: the factor by which the scale backs off, between 0 and 1.

    Returns:
        A `DynamicLossScale`, or a `VerbatimLossScale` if ``init_loss_scale`` is below
        1.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.tf_contrib_exponential_update(2.0**15, 1000)
        >>> rule.hysteresis, rule.hysteresis_refill, rule.backoff_factor
        (2, 'change', 0.8)

    References:
        `tensorflow/contrib/mixed_precision of 1.15
        <https://github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/contrib/mixed_precision/python/loss_scale_manager.py>`_
    """
    return growing(
        init_scale=check("init_scale", init_loss_scale, "init_loss_scale"),
        growth_interval=check(
            "growth_interval", incr_every_n_steps, "incr_every_n_steps"
        ),
        hysteresis=check(
            "hysteresis", decr_every_n_nan_or_inf, "decr_every_n_nan_or_inf"
        ),
        hysteresis_refill="change",
        growth_factor=check("growth_factor", incr_ratio, "incr_ratio"),
        backoff_factor=check("backoff_factor", decr_ratio, "decr_ratio"),
        min_scale=1.0,
    )
