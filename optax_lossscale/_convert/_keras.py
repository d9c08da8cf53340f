"""Keras 3."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import presets
from .._loss_scale import LossScale
from .._state import LossScaleState
from ._common import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_scale,
    restored,
)

# The places of `step_counter` and `dynamic_scale` among a LossScaleOptimizer's own
# variables, which come before those of the optimizer inside.
_COUNTER, _SCALE = "2", "3"


def from_keras_state_dict(
    d: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, LossScale]:
    """Go on where a ``keras.optimizers.LossScaleOptimizer`` (Keras 3) stopped.

    Args:
        d: what its ``save_own_variables`` stored: ``"2"`` is its count of steps and
            ``"3"`` its scale; the others belong to the optimizer inside and are passed
            over.
        arguments: those of `presets.keras_loss_scale`, which Keras saves in its
            configuration.

    Returns:
        The state, and the rule of `presets.keras_loss_scale`.

    Raises:
        TypeError: if ``d`` is no dictionary, or an argument is unknown.
        ValueError: if one of the two is missing, or a value is out of range.

    Examples:
        >>> import optax_lossscale as ls
        >>> d = {"2": 7, "3": 1024.0}
        >>> state, rule = ls.from_keras_state_dict(d, dynamic_growth_steps=100)
        >>> ls.to_keras_state_dict(state, rule) == d
        True

    References:
        `keras.optimizers.LossScaleOptimizer
        <https://keras.io/api/optimizers/loss_scale_optimizer/>`_
    """
    if isinstance(d, Mapping):
        d = {key: d[key] for key in (_COUNTER, _SCALE) if key in d}
    check_keys(d, (_COUNTER, _SCALE), "what `save_own_variables` stored")
    rule = presets.keras_loss_scale(**arguments)
    scale, counter = read_scale(d, _SCALE), read_count(d, _COUNTER)
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
        >>> rule = ls.DynamicLossScale()
        >>> float(ls.to_keras_state_dict(rule.init(), rule)["3"])
        32768.0
    """
    scale, growth_tracker, _ = numbers(state)
    check_follows(rule, "Keras", hysteresis=1, growth_factor=2.0, backoff_factor=0.5)
    return {
        _COUNTER: np.asarray(growth_tracker, np.int32),
        _SCALE: np.asarray(scale, np.float32),
    }
