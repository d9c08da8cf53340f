"""Ask whether steps were applied, and protect what the optimizer does not see."""

from typing import Any

import jax
import jax.numpy as jnp

from .._axes import AxisName
from .._dtypes import is_inexact
from .._find import get_loss_scale_state
from .._finite import all_finite
from .._state import LossScaleState, check_state
from .._tree import as_sharded, same_structure, select, where
from .._validation import warn


def was_applied(state: Any) -> jax.Array:
    """Return whether the last step was applied, for example to log skipped steps.

    Args:
        state: the optimizer state after the step, as for `get_loss_scale_state`.

    Returns:
        A boolean array of shape ``()``, True before the first step.

    Raises:
        ValueError: as `get_loss_scale_state`.

    Examples:
        >>> import optax_lossscale as ls
        >>> bool(ls.was_applied(ls.LossScaleState.create(128.0).record(False)))
        False
    """
    return get_loss_scale_state(state).applied


def keep_if_applied(
    state: Any, new: Any, old: Any, *, axis_name: AxisName | None = None
) -> Any:
    """Return ``new`` if the last step was applied and ``new`` is finite, else ``old``.

    Args:
        state: the optimizer state that ``update`` returned, as for
            `get_loss_scale_state`. That before ``update`` tells of the previous step.
        new: what the optimizer does not protect, such as BatchNorm statistics, counters
            and PRNG keys, after the step; any pytree, as for `select`. It may be the
            whole of Flax's ``TrainState``.
        old: the values before the step, shaped like ``new``, but other arrays.
        axis_name: the mapped axes, as for `all_finite`.

    Returns:
        The whole of ``new``, or the whole of ``old``. A `LossScaleState` always comes
        from ``new``; otherwise the scale that overflowed would return. Where ``old`` is
        not finite, such as a minimum that starts at inf, ``new`` need not be finite.

    Raises:
        ValueError: as `get_loss_scale_state`, `select` and `all_finite`.

    Examples:
        >>> import optax_lossscale as ls
        >>> skipped = ls.LossScaleState.create(128.0).record(False)
        >>> float(ls.keep_if_applied(skipped, 1.0, 0.0))
        0.0
    """
    scale_state = check_state(get_loss_scale_state(state))
    given, new, old = new, _without_scales(new), _without_scales(old)
    leaves = jax.tree.leaves(new)
    same = [x is y for x, y in zip(leaves, jax.tree.leaves(old), strict=False)]
    if any(map(is_inexact, leaves)) and all(same):
        warn(
            "`new` and `old` are the same arrays, so a NaN in them would stay. If the "
            "step changes them in place, as Flax NNX does, copy them before it with "
            "`jax.tree.map(jnp.copy, old)`. If it does not change them, leave them out."
        )

    def checkable(new: Any, old: Any) -> Any:
        if not is_inexact(new) or jnp.shape(new) != jnp.shape(old):
            return new  # `select` raises
        return _zero_where_old_is_not_finite(new, old)

    checked = new
    if same_structure(new, old):
        checked = jax.tree.map(checkable, new, old)
    applied = scale_state.applied & all_finite(checked, axis_name=axis_name)
    kept = select(applied, new, old)
    return jax.tree.map(
        lambda x, kept: x if _is_scale(x) else kept, given, kept, is_leaf=_is_scale
    )


def _is_scale(x: Any) -> bool:
    return isinstance(x, LossScaleState)


def _without_scales(tree: Any) -> Any:
    return jax.tree.map(lambda x: None if _is_scale(x) else x, tree, is_leaf=_is_scale)


# Compiled: a zero outside of a program would be transferred to the device.
@jax.jit
def _zero_where_old_is_not_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    return where(as_sharded(jnp.isfinite(old), new), new, jnp.zeros_like(new))
