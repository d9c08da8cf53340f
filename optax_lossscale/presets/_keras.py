"""Keras 3, and Keras 2 as ``tf.keras``: ``LossScaleOptimizer``."""

from .._rules import fields
from .._rules.fixed import FixedLossScale
from .._validation import check_switch
from ._build import Growing, build_rule


def keras_loss_scale(
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
    dynamic: bool = True,
) -> Growing:
    """Return the rule of ``keras.optimizers.LossScaleOptimizer`` (Keras 3).

    Args:
        initial_scale: the first scale, from 2**-126 to 2**126.
        dynamic_growth_steps: finite steps in a row before the scale doubles.
        dynamic: True, as Keras 3 requires.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.keras_loss_scale().init_scale
        32768.0
    """
    if dynamic is not True:
        raise ValueError(
            f"`dynamic` must be True, got {dynamic!r}. For a scale that never changes, "
            "use `FixedLossScale`."
        )
    return build_rule(
        init_scale=fields.scale("initial_scale", initial_scale),
        growth_interval=fields.growth_interval(
            "dynamic_growth_steps", dynamic_growth_steps
        ),
    )


def tf_keras_loss_scale(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> Growing | FixedLossScale:
    """Return the rule of ``tf.keras.mixed_precision.LossScaleOptimizer`` (Keras 2).

    It is the rule of `tf_dynamic_loss_scale` with a multiplier of 2.

    Args:
        dynamic: whether the scale changes. If not, every step is applied.
        initial_scale: the first scale, 2**15 by default, or the constant one.
        dynamic_growth_steps: finite steps in a row before the scale doubles, 2000 by
            default. Leave it out if ``dynamic`` is False.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_keras_loss_scale(dynamic=False, initial_scale=1024)
        FixedLossScale(loss_scale=1024.0, skip_nonfinite=False)
    """
    if check_switch("dynamic", dynamic, "Pass a number as `initial_scale`."):
        first = 2.0**15 if initial_scale is None else initial_scale
        steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
        return build_rule(
            init_scale=fields.scale("initial_scale", first),
            growth_interval=fields.growth_interval("dynamic_growth_steps", steps),
            min_scale=1.0,
        )
    if dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be left out if `dynamic` is False, got "
            f"{dynamic_growth_steps!r}. A constant scale does not use it."
        )
    scale = fields.constant_scale("initial_scale", initial_scale)
    return FixedLossScale(scale, skip_nonfinite=False)
