"""Ask whether steps were applied, and protect what the optimizer does not see."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp

from ._find import get_loss_scale_state
from ._finite import all_finite
from ._jax_internals import as_sharded
from ._state import LossScaleState, check_state
from ._tree import choose, is_inexact, same_structure, select
from ._validation import AxisName

# One array of each state that an update has taken, by its id.
_taken: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def was_applied(state: Any) -> jax.Array:
    """Return whether the last step was applied, for example to log skipped steps.

    Args:
        state: the optimizer state after the step, as for `get_loss_scale_state`.

    Returns:
        A boolean array of shape ``()``, True before the first step.

    Raises:
        ValueError: as `get_loss_scale_state`, or if ``state`` holds no numbers.

    Examples:
        >>> import optax_lossscale as ls
        >>> bool(ls.was_applied(ls.LossScaleState.create(128.0).record(False)))
        False
    """
    return _with_numbers(state).applied


def applied_steps(state: Any, steps: jax.typing.ArrayLike) -> jax.Array:
    """Return how many of the steps so far were applied.

    Args:
        state: the optimizer state, as for `get_loss_scale_state`.
        steps: the number of steps since ``init``, applied or skipped, such as ``step``
            of a Flax ``TrainState`` or ``nnx.Optimizer``.

    Returns:
        ``steps`` minus ``skipped_steps`` of the state, an int32 array of shape ``()``.

    Raises:
        ValueError: as `was_applied`.

    Examples:
        >>> import optax_lossscale as ls
        >>> int(ls.applied_steps(ls.LossScaleState.create(128.0).record(False), 3))
        2
    """
    return jnp.asarray(steps, jnp.int32) - _with_numbers(state).skipped_steps


def keep_if_applied(
    state: Any, new: Any, old: Any, *, axis_name: AxisName | None = None
) -> Any:
    """Return ``new`` if the last step was applied and ``new`` is finite, else ``old``.

    Args:
        state: the optimizer state after the step, which ``update`` returned, as for
            `get_loss_scale_state`. The one from before the step is refused if
            ``update`` has taken it already, and cannot be recognized otherwise.
        new: what the optimizer does not protect, such as BatchNorm statistics, counters
            and PRNG keys, after the step; any pytree, as for `select`.
        old: the values before the step, with the structure and shapes of ``new``.
        axis_name: the mapped axes, as for `all_finite`.

    Returns:
        All of ``new`` or ``old``. What is finite in ``old`` must be finite in ``new``.

    Raises:
        ValueError: as `get_loss_scale_state`, `select` and `all_finite`, or if
            ``state`` is known to be from before the step.

    Examples:
        >>> import optax_lossscale as ls
        >>> skipped = ls.LossScaleState.create(128.0).record(False)
        >>> float(ls.keep_if_applied(skipped, 1.0, 0.0))
        0.0
    """
    scale_state = check_state(get_loss_scale_state(state))
    if _taken.get(id(scale_state.skipped_steps)) is scale_state.skipped_steps:
        raise ValueError(
            "`state` must be the optimizer state after the step, got one that `update` "
            "has taken already, which tells of the previous step. Pass the one that it "
            "returned."
        )

    def compared(new: Any, old: Any) -> Any:
        if not is_inexact(new) or jnp.shape(new) != jnp.shape(old):
            return new  # `select` raises
        # A running minimum, for example, may start from infinity and stay there.
        finite = as_sharded(jnp.isfinite(old), new)
        return choose(finite, new, jnp.zeros_like(new))

    still = jax.tree.map(compared, new, old) if same_structure(new, old) else new
    return select(
        scale_state.applied & all_finite(still, axis_name=axis_name), new, old
    )


def take(state: LossScaleState) -> None:
    """Remember that an update has taken a state, which is then out of date."""
    if isinstance(state.skipped_steps, jax.Array):
        _taken[id(state.skipped_steps)] = state.skipped_steps


def _with_numbers(state: Any) -> LossScaleState:
    scale_state = get_loss_scale_state(state)
    if isinstance(scale_state.loss_scale, jax.ShapeDtypeStruct):
        check_state(scale_state)
    return scale_state
