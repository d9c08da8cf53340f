"""TensorFlow and ``tf.contrib``: their loss scales and managers."""

from .._rules.arguments import (
    check_backoff_factor,
    check_fixed_scale,
    check_growth_factor,
    check_growth_interval,
    check_hysteresis,
    check_init_scale,
)
from .._rules.fixed import FixedLossScale
from ._build import Growing, factors, growing


def tf_dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> Growing:
    """Return the rule of TensorFlow's ``DynamicLossScale``.

    The scale is multiplied by ``multiplier`` at every ``increment_period``-th finite
    step in a row, and divided by it, down to 1, at every non-finite step.

    Departures: the ceiling is 2**126, where TensorFlow's is the largest float32, whose
    reciprocal is flushed to zero.

    Args:
        initial_loss_scale: the first scale. One below 1 stays until an overflow
            raises it to 1, as in TensorFlow.
        increment_period: finite steps in a row before a growth.
        multiplier: what a growth multiplies by and a backoff divides by, above 1.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale below 1.

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
        init_scale=check_init_scale(initial_loss_scale, "initial_loss_scale"),
        growth_interval=check_growth_interval(increment_period, "increment_period"),
        **factors(multiplier, "multiplier"),
        min_scale=1.0,
    )


def tf_fixed_loss_scale(loss_scale_value: float) -> FixedLossScale:
    """Return the rule of TensorFlow's ``FixedLossScale``.

    The scale stays, and every step is applied, finite or not.

    Departures: none. To skip non-finite steps use ``FixedLossScale(value)``.

    Args:
        loss_scale_value: the scale, 1 or more.

    Returns:
        A `FixedLossScale` that skips nothing.

    Raises:
        ValueError: if the scale is below 1 or no number.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_fixed_loss_scale(128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)

    References:
        `tf.compat.v1.mixed_precision.FixedLossScale
        <https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/FixedLossScale>`_
    """
    scale = check_fixed_scale(loss_scale_value, "loss_scale_value")
    return FixedLossScale(scale, skip_nonfinite=False)


def tf_contrib_fixed(loss_scale: float) -> FixedLossScale:
    """Return the rule of ``tf.contrib.mixed_precision.FixedLossScaleManager``.

    The scale stays, and steps with non-finite gradients are skipped.

    Departures: none.

    Args:
        loss_scale: the scale, 1 or more.

    Returns:
        A `FixedLossScale`.

    Raises:
        ValueError: if the scale is below 1 or no number.

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
    """Return the rule of ``ExponentialUpdateLossScaleManager`` of ``tf.contrib``.

    The scale is multiplied by ``incr_ratio`` at every ``incr_every_n_steps``-th finite
    step in a row, and by ``decr_ratio``, down to 1, at every
    ``decr_every_n_nan_or_inf``-th non-finite step; these add up over finite steps, and
    any change of the scale clears the sum.

    Departures: the ceiling is 2**126, where ``tf.contrib``'s is the largest float32.
    With the default ``decr_ratio`` the scale is no power of two and unscaling rounds:
    0.5 is exact.

    Args:
        init_loss_scale: the first scale. One below 1 stays until an overflow raises it
            to 1, as in ``tf.contrib``.
        incr_every_n_steps: finite steps in a row before a growth.
        decr_every_n_nan_or_inf: non-finite steps before a backoff.
        incr_ratio: what a growth multiplies the scale by, above 1.
        decr_ratio: what a backoff multiplies it by, between 0 and 1.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale below 1.

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
        init_scale=check_init_scale(init_loss_scale, "init_loss_scale"),
        growth_interval=check_growth_interval(incr_every_n_steps, "incr_every_n_steps"),
        hysteresis=check_hysteresis(decr_every_n_nan_or_inf, "decr_every_n_nan_or_inf"),
        hysteresis_refill="change",
        growth_factor=check_growth_factor(incr_ratio, "incr_ratio"),
        backoff_factor=check_backoff_factor(decr_ratio, "decr_ratio"),
        min_scale=1.0,
    )
