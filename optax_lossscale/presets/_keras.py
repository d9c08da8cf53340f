"""Keras 3, and Keras 2 as ``tf.keras``: ``LossScaleOptimizer``."""

from collections.abc import Mapping
from typing import Any

from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import check
from ._build import Growing, growing
from ._saved import Form, arrays, restored

# The variables "2" and "3" of a LossScaleOptimizer are its `step_counter` and
# `dynamic_scale`. Those of its inner optimizer come after them.
_FORM = Form(
    system="Keras",
    source="what `save_own_variables` stored",
    fields={"2": "growth_tracker", "3": "loss_scale"},
)


def keras_loss_scale(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> Growing:
    """Return the rule of ``keras.optimizers.LossScaleOptimizer`` (Keras 3).

    Args:
        initial_scale: the first scale, from 2**-126 to 2**126.
        dynamic_growth_steps: finite steps in a row before the scale doubles.

    Returns:
        A `DynamicLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.keras_loss_scale().init_scale
        32768.0
    """
    return growing(**locals())


def from_keras_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, Growing]:
    """Return the state and the rule that continue a Keras 3 ``LossScaleOptimizer``.

    Args:
        state_dict: what its ``save_own_variables`` stored. ``"2"`` is the step counter
            and ``"3"`` the scale. Other entries are ignored.
        arguments: those of `keras_loss_scale`, which Keras saves in its configuration.

    Returns:
        The state, and the rule of `keras_loss_scale`.

    Raises:
        TypeError, ValueError: as `from_torch_state_dict`.

    Examples:
        >>> from optax_lossscale import presets
        >>> state_dict = {"2": 7, "3": 1024.0}
        >>> state, rule = presets.from_keras_state_dict(state_dict, initial_scale=8.0)
        >>> presets.to_keras_state_dict(state, rule) == state_dict
        True
    """
    if isinstance(state_dict, Mapping):
        state_dict = {k: x for k, x in state_dict.items() if k in _FORM.fields}
    fields, _ = _FORM.read(state_dict)
    rule = keras_loss_scale(**arguments)
    return restored(rule, fields), rule


def to_keras_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return the variables of a Keras 3 ``LossScaleOptimizer`` that continues a run.

    Keras saves neither limits nor the counts of skipped steps.

    Args:
        state: whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        The two entries of `from_keras_state_dict`, as arrays of shape ``()``. Add them
        to the variables that you pass to ``load_own_variables``.

    Raises:
        ValueError: as `get_loss_scale_state`, or if Keras cannot follow the rule.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.keras_loss_scale()
        >>> float(presets.to_keras_state_dict(rule.init(), rule)["3"])
        32768.0
    """
    required = {"hysteresis": 1, "growth_factor": 2.0, "backoff_factor": 0.5}
    return arrays(_FORM.write(state, rule, **required))


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

    Returns:
        A `DynamicLossScale` or `VerbatimLossScale`, or with a constant scale a
        `FixedLossScale` that skips nothing. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.tf_keras_loss_scale(dynamic=False, initial_scale=1024)
        FixedLossScale(loss_scale=1024.0, skip_nonfinite=False)
    """
    if check("dynamic", dynamic):
        first = 2.0**15 if initial_scale is None else initial_scale
        steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
        return growing(initial_scale=first, dynamic_growth_steps=steps, min_scale=1.0)
    if dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be left out if `dynamic` is False, got "
            f"{dynamic_growth_steps!r}. A constant scale does not use it."
        )
    scale = check("loss_scale", initial_scale, "initial_scale")
    return FixedLossScale(scale, skip_nonfinite=False)
