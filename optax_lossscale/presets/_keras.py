"""Keras 3, and Keras 2 as tf.keras."""

from .._loss_scale import FixedLossScale, LossScale
from .._validation import check_bool
from ._build import growing, named
from ._tensorflow import tf_dynamic_loss_scale


def keras_loss_scale(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> LossScale:
    """Return the rule of ``keras.optimizers.LossScaleOptimizer`` (Keras 3).

    The scale doubles at every ``dynamic_growth_steps``-th finite step in a row and is
    halved at every other step.

    Departures: the scale stays between 2**-126 and 2**126. That of Keras falls to 0,
    from where it applies NaN, and grows to infinity, from where it skips every step.

    Args:
        initial_scale: the first scale, from 2**-126 to 2**126.
        dynamic_growth_steps: finite steps in a row before a growth.

    Returns:
        A `DynamicLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.keras_loss_scale().min_scale == 2.0**-126
        True

    References:
        `keras.optimizers.LossScaleOptimizer
        <https://keras.io/api/optimizers/loss_scale_optimizer/>`_
    """
    with named(init_scale="initial_scale", growth_interval="dynamic_growth_steps"):
        return growing(init_scale=initial_scale, growth_interval=dynamic_growth_steps)


def tf_keras_loss_scale(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """Return the rule of ``tf.keras.mixed_precision.LossScaleOptimizer`` (Keras 2).

    That of `tf_dynamic_loss_scale` with a multiplier of 2; if not ``dynamic`` the scale
    stays, and every step is applied.

    Departures: as for `tf_dynamic_loss_scale`.

    Args:
        dynamic: whether the scale moves.
        initial_scale: the first scale, 2**15 if left out; required if not ``dynamic``.
        dynamic_growth_steps: finite steps in a row before a growth, 2000 if left out;
            must be left out if not ``dynamic``.

    Returns:
        A `DynamicLossScale`, or a `FixedLossScale` that skips nothing; a
        `VerbatimLossScale` for a first scale below 1.

    Raises:
        ValueError: if an argument is out of range, missing or too many.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_keras_loss_scale() == presets.tf_dynamic_loss_scale()
        True
        >>> presets.tf_keras_loss_scale(dynamic=False, initial_scale=1024)
        FixedLossScale(loss_scale=1024.0, skip_nonfinite=False)

    References:
        `tf.keras.mixed_precision.LossScaleOptimizer
        <https://www.tensorflow.org/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer>`_
    """
    check_bool("dynamic", dynamic, "A number is the `initial_scale`.")
    if not dynamic and dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be left out where `dynamic` is False, got "
            f"{dynamic_growth_steps!r}. A scale that stays has no use for it."
        )
    if not dynamic:
        with named(loss_scale="initial_scale"):
            return FixedLossScale(initial_scale, skip_nonfinite=False)  # type: ignore[arg-type]  # None is refused with a sentence
    with named(
        initial_loss_scale="initial_scale", increment_period="dynamic_growth_steps"
    ):
        return tf_dynamic_loss_scale(
            2.0**15 if initial_scale is None else initial_scale,
            2000 if dynamic_growth_steps is None else dynamic_growth_steps,
        )
