"""Ask whether steps were applied, and protect what the optimizer does not see."""

from typing import Any

import jax
import jax.numpy as jnp

from ._find import get_loss_scale_state
from ._finite import all_finite
from ._state import check_state
from ._tree import is_inexact, same_structure, select
from ._validation import AxisName


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
    return get_loss_scale_state(state).grads_finite


def applied_steps(state: Any, steps: jax.typing.ArrayLike) -> jax.Array:
    """Return how many of the steps so far were applied.

    Args:
        state: the optimizer state, as for `get_loss_scale_state`.
        steps: the number of steps since ``init``, applied or skipped, such as ``step``
            of a Flax ``TrainState`` or ``nnx.Optimizer``.

    Returns:
        ``steps`` minus ``skipped_steps`` of the state, an int32 array of shape ``()``.

    Raises:
        ValueError: as `get_loss_scale_state`.

    Examples:
        >>> import optax_lossscale as ls
        >>> int(ls.applied_steps(ls.LossScaleState.create(128.0).record(False), 3))
        2
    """
    skipped_steps = get_loss_scale_state(state).skipped_steps
    return jnp.asarray(steps, jnp.int32) - skipped_steps


def keep_if_applied(
    state: Any, new: Any, old: Any, *, axis_name: AxisName | None = None
) -> Any:
    """Return ``new`` if the last step was applied and ``new`` is finite, else ``old``.

    Args:
        state: the optimizer state after the step, as for `get_loss_scale_state`.
        new: what the optimizer does not protect, such as BatchNorm statistics, counters
            and PRNG keys, after the step; any pytree, as for `select`.
        old: the values before the step, with the structure and shapes of ``new``.
        axis_name: the mapped axes, as for `all_finite`.

    Returns:
        All of ``new`` or ``old``. What is finite in ``old`` must be finite in ``new``.

    Raises:
        ValueError: as `get_loss_scale_state`, `select` and `all_finite`.

    Examples:
        >>> import optax_lossscale as ls
        >>> skipped = ls.LossScaleState.create(128.0).record(False)
        >>> float(ls.keep_if_applied(skipped, 1.0, 0.0))
        0.0
    """
    applied = check_state(get_loss_scale_state(state)).grads_finite

    def compared(new: Any, old: Any) -> Any:
        if not is_inexact(new) or jnp.shape(new) != jnp.shape(old):
            return new  # `select` raises
        # A running minimum, for example, may start from infinity and stay there.
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    still = jax.tree.map(compared, new, old) if same_structure(new, old) else new
    return select(applied & all_finite(still, axis_name=axis_name), new, old)
