"""TensorFlow and ``tf.contrib``: dynamic loss scales."""

from .._rules import fields
from ._build import Growing, build_rule


def tf_dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> Growing:
    """Return the rule of TensorFlow's ``DynamicLossScale``, whose smallest scale is 1.

    Args:
        initial_loss_scale: the first scale, from 2**-126 to 2**126.
        increment_period: finite steps in a row before the scale grows.
        multiplier: the factor by which the scale grows and backs off, above 1.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_dynamic_loss_scale(multiplier=4.0).backoff_factor
        0.25
    """
    return build_rule(
        init_scale=fields.scale("initial_loss_scale", initial_loss_scale),
        growth_interval=fields.growth_interval("increment_period", increment_period),
        min_scale=1.0,
        growth_factor=fields.growth_factor("multiplier", multiplier),
    )


def tf_contrib_exponential_update(
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> Growing:
    """Return the rule of ``ExponentialUpdateLossScaleManager`` in ``tf.contrib``.

    Non-finite steps are counted across finite ones, and any change of the scale resets
    the count. The smallest scale is 1. With a ``decr_ratio`` of 0.8, the scale does not
    stay a power of two, so unscaling rounds; with 0.5 it is exact.

    Args:
        init_loss_scale: the first scale, from 2**-126 to 2**126.
        incr_every_n_steps: finite steps in a row before the scale grows.
        decr_every_n_nan_or_inf: how many non-finite steps it takes to back off.
        incr_ratio: the factor by which the scale grows, above 1.
        decr_ratio: the factor by which the scale backs off, between 0 and 1.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_contrib_exponential_update(2.0**15, 1000).hysteresis_refill
        'change'
    """
    return build_rule(
        init_scale=fields.scale("init_loss_scale", init_loss_scale),
        growth_factor=fields.growth_factor("incr_ratio", incr_ratio),
        backoff_factor=fields.backoff_factor("decr_ratio", decr_ratio),
        growth_interval=fields.growth_interval(
            "incr_every_n_steps", incr_every_n_steps
        ),
        min_scale=1.0,
        hysteresis=fields.hysteresis(
            "decr_every_n_nan_or_inf", decr_every_n_nan_or_inf
        ),
        hysteresis_refill="change",
    )
