"""Keras 3, and Keras 2 as ``tf.keras``: ``LossScaleOptimizer``."""

from collections.abc import Mapping
from typing import Any, Literal, overload

import numpy as np

from .._rules.arguments import (
    check_fixed_scale,
    check_growth_interval,
    check_init_scale,
)
from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import check_bool
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

# The places of `step_counter` and `dynamic_scale` among a LossScaleOptimizer's own
# variables, which come before those of the optimizer inside.
_COUNTER, _SCALE = "2", "3"


def keras_loss_scale(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> Growing:
    """Return the rule of ``keras.optimizers.LossScaleOptimizer`` (Keras 3).

    The scale doubles at every ``dynamic_growth_steps``-th finite step in a row and is
    halved at every non-finite step.

    Departures: the scale stays between 2**-126 and 2**126. Keras's falls to 0, from
    where it applies NaN, and grows to infinity, from where it skips every step.

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
    return growing(
        init_scale=check_init_scale(initial_scale, "initial_scale"),
        growth_interval=check_growth_interval(
            dynamic_growth_steps, "dynamic_growth_steps"
        ),
    )


def from_keras_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, Growing]:
    """Go on where a ``keras.optimizers.LossScaleOptimizer`` (Keras 3) stopped.

    Args:
        state_dict: what its ``save_own_variables`` stored: ``"2"`` is its count of
            steps and ``"3"`` its scale; the others belong to the optimizer inside and
            are passed over.
        arguments: those of `keras_loss_scale`, which Keras saves in its
            configuration.

    Returns:
        The state, and the rule of `keras_loss_scale`.

    Raises:
        TypeError: if ``state_dict`` is no dictionary, or an argument is unknown.
        ValueError: if one of the two is missing, or a value is no number or out of
            range.

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
    """Return the variables of the ``LossScaleOptimizer`` that goes on from a state.

    Keras has no limits for the scale, and does not count skipped steps: these stay
    behind.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that made it.

    Returns:
        The two keys of `from_keras_state_dict`, with arrays of shape ``()``, to put
        into what ``load_own_variables`` takes.

    Raises:
        ValueError: if Keras could not follow the rule, or ``state`` has no loss scale
            or more than one.

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

    It is the rule of `tf_dynamic_loss_scale` with a multiplier of 2. If not
    ``dynamic``, the scale stays and every step is applied.

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
        scale = check_fixed_scale(initial_scale, "initial_scale")
        return FixedLossScale(scale, skip_nonfinite=False)
    if initial_scale is None:
        initial_scale = 2.0**15
    if dynamic_growth_steps is None:
        dynamic_growth_steps = 2000
    return tf_dynamic_loss_scale(
        check_init_scale(initial_scale, "initial_scale"),
        check_growth_interval(dynamic_growth_steps, "dynamic_growth_steps"),
    )
