"""Keras 3, and Keras 2 as ``tf.keras``: ``LossScaleOptimizer``."""

from collections.abc import Mapping
from typing import Any, Literal, overload

import numpy as np

from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import check, check_bool
from ._build import Growing, growing
from ._saved import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_scale,
    restored,
)
from ._tensorflow import tf_dynamic_loss_scale

# The positions of `step_counter` and `dynamic_scale` among the variables of a
# LossScaleOptimizer. Those of its inner optimizer come after them.
_COUNTER, _SCALE = "2", "3"


def keras_loss_scale(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> Growing:
    """Return the rule of ``keras.optimizers.LossScaleOptimizer`` (Keras 3).

    The scale is doubled after every ``dynamic_growth_steps`` finite steps in a row, and
    halved after every non-finite step.

    Departures: the scale stays between 2**-126 and 2**126. In Keras it can fall to 0,
    after which NaN is applied, or grow to infinity, after which every step is skipped.

    Args:
        initial_scale: the first scale, from 2**-126 to 2**126.
        dynamic_growth_steps: finite steps in a row before the scale grows.

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
    return growing(
        init_scale=check("init_scale", initial_scale, "initial_scale"),
        growth_interval=check(
            "growth_interval", dynamic_growth_steps, "dynamic_growth_steps"
        ),
    )


def from_keras_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, Growing]:
    """Return the state and the rule that continue a Keras 3 ``LossScaleOptimizer``.

    Args:
        state_dict: what ``save_own_variables`` of the
            ``keras.optimizers.LossScaleOptimizer`` stored. ``"2"`` is its step counter
            and ``"3"`` its scale. The other entries belong to the inner optimizer and
            are ignored.
        arguments: the arguments of `keras_loss_scale`, which Keras saves in its
            configuration.

    Returns:
        The state, and the rule of `keras_loss_scale`.

    Raises:
        TypeError: if ``state_dict`` is not a dictionary, or an argument is unknown.
        ValueError: if one of the two keys is missing, or a value is not a number or out
            of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> state_dict = {"2": 7, "3": 1024.0}
        >>> state, rule = presets.from_keras_state_dict(
        ...     state_dict, dynamic_growth_steps=100
        ... )
        >>> presets.to_keras_state_dict(state, rule) == state_dict
        True

    References:
        `keras.optimizers.LossScaleOptimizer
        <https://keras.io/api/optimizers/loss_scale_optimizer/>`_
    """
    keys = (_COUNTER, _SCALE)
    if isinstance(state_dict, Mapping):
        state_dict = {key: state_dict[key] for key in keys if key in state_dict}
    check_keys(state_dict, keys, "what `save_own_variables` stored")
    rule = keras_loss_scale(**arguments)
    scale, counter = read_scale(state_dict, _SCALE), read_count(state_dict, _COUNTER)
    return restored(rule, loss_scale=scale, growth_tracker=counter), rule


def to_keras_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return the variables of a Keras 3 ``LossScaleOptimizer`` that continues a run.

    Keras does not limit the scale and does not count skipped steps, so the rule's
    limits and these counts are lost.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        The two keys of `from_keras_state_dict`, with arrays of shape ``()``. Add them
        to the variables that you pass to ``load_own_variables``.

    Raises:
        ValueError: if Keras cannot follow the rule, or ``state`` has no loss scale or
            more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> from optax_lossscale import presets
        >>> rule = ls.DynamicLossScale()
        >>> float(presets.to_keras_state_dict(rule.init(), rule)["3"])
        32768.0
    """
    scale, growth_tracker, _ = numbers(state)
    check_follows(rule, "Keras", hysteresis=1, growth_factor=2.0, backoff_factor=0.5)
    return {
        _COUNTER: np.asarray(growth_tracker, np.int32),
        _SCALE: np.asarray(scale, np.float32),
    }


@overload
def tf_keras_loss_scale(
    dynamic: Literal[True] = ...,
    initial_scale: float | None = ...,
    dynamic_growth_steps: int | None = ...,
) -> Growing: ...


@overload
def tf_keras_loss_scale(
    dynamic: bool,
    initial_scale: float | None = ...,
    dynamic_growth_steps: int | None = ...,
) -> Growing | FixedLossScale: ...


def tf_keras_loss_scale(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> Growing | FixedLossScale:
    """Return the rule of ``tf.keras.mixed_precision.LossScaleOptimizer`` (Keras 2).

    It is the rule of `tf_dynamic_loss_scale` with a multiplier of 2. If ``dynamic`` is
    False, the scale is constant and every step is applied.

    Departures: those of `tf_dynamic_loss_scale`.

    Args:
        dynamic: whether the scale changes.
        initial_scale: the first scale, by default 2**15. It is required if ``dynamic``
            is False.
        dynamic_growth_steps: finite steps in a row before the scale grows, by default
            2000. It must be left out if ``dynamic`` is False.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` if ``initial_scale`` is below 1; or
        a `FixedLossScale` that skips nothing if ``dynamic`` is False.

    Raises:
        ValueError: if an argument is out of range, missing, or not allowed.

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
    check_bool("dynamic", dynamic, "Pass a number as `initial_scale`.")
    if not dynamic and dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be left out if `dynamic` is False, got "
            f"{dynamic_growth_steps!r}. A constant scale does not use it."
        )
    if not dynamic:
        scale = check("loss_scale", initial_scale, "initial_scale")
        return FixedLossScale(scale, skip_nonfinite=False)
    if initial_scale is None:
        initial_scale = 2.0**15
    if dynamic_growth_steps is None:
        dynamic_growth_steps = 2000
    return tf_dynamic_loss_scale(
        check("init_scale", initial_scale, "initial_scale"),
        check("growth_interval", dynamic_growth_steps, "dynamic_growth_steps"),
    )
