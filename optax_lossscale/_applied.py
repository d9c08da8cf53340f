"""Ask whether steps were applied, and protect what the optimizer does not see."""

from typing import Any

import jax
import jax.numpy as jnp

from ._find import get_loss_scale_state
from ._finite import all_finite
from ._tree import is_inexact, same_structure, select
from ._validation import AxisName


def was_applied(state: Any) -> jax.Array:
    """Return whether the last step was applied.

    Use it to log skipped steps, or to decide what to do after one. To keep BatchNorm
    statistics, counters or PRNG keys in a skipped step, use `keep_if_applied`.

    A step is skipped if its gradients are not finite, or if ``update`` was passed a
    non-finite ``value`` or a ``grads_finite`` that is False. With ``check_updates``, it
    is also skipped if the optimizer turns finite gradients into NaN or inf.

    Args:
        state: the optimizer state after the step, or whatever `get_loss_scale_state`
            takes.

    Returns:
        A boolean array of shape ``()``. It is True before the first step, and always
        True if the rule never skips.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> tx = ls.with_loss_scaling(optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> updates, opt_state = tx.update(jnp.array([1.0, jnp.nan]), opt_state)
        >>> bool(ls.was_applied(opt_state))
        False
    """
    return get_loss_scale_state(state).grads_finite


def applied_steps(state: Any, steps: jax.typing.ArrayLike) -> jax.Array:
    """Return how many of the steps so far were applied.

    Use it if you have a counter outside the optimizer, such as ``step`` of a Flax
    ``TrainState`` or ``nnx.Optimizer``. These count skipped steps, too.

    Args:
        state: the optimizer state, or whatever `get_loss_scale_state` takes.
        steps: the number of steps since ``init``, applied or skipped.

    Returns:
        An int32 array of shape ``()``: ``steps`` minus the ``skipped_steps`` of the
        state.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> tx = ls.with_loss_scaling(optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> for gradient in (1.0, jnp.inf, 2.0):
        ...     updates, opt_state = tx.update(jnp.full(2, gradient), opt_state)
        >>> int(ls.applied_steps(opt_state, 3))
        2
    """
    skipped_steps = get_loss_scale_state(state).skipped_steps
    return jnp.asarray(steps, jnp.int32) - skipped_steps


def keep_if_applied(
    state: Any, new: Any, old: Any, axis_name: AxisName | None = None
) -> Any:
    """Return ``new`` if the last step was applied and ``new`` is finite, else ``old``.

    The optimizer protects only its own state and the weights. Use this for everything
    else that a step changes. If the forward pass overflows, BatchNorm statistics and
    moving averages take the NaN, even if the gradients are finite. Counters and PRNG
    keys advance in skipped steps.

    An element that is not finite in ``old`` need not be finite in ``new``. A running
    minimum, for example, may start from infinity.

    Args:
        state: the optimizer state after the step, or whatever `get_loss_scale_state`
            takes.
        new: the values after the step, any pytree. Arrays are selected as by `select`,
            and other leaves are returned unchanged.
        old: the values before the step, with the structure and shapes of ``new``.
        axis_name: the mapped axis, or a tuple of them, along which ``new`` must be
            finite on all devices (``shard_map``, ``pmap``) or for all members
            (``vmap``).

    Returns:
        All of ``new`` if the step was applied and no element that is finite in ``old``
        is NaN or inf in ``new``; otherwise all of ``old``.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one, if the structures
            or shapes of ``new`` and ``old`` differ, or if ``axis_name`` is not bound
            here.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> tx = ls.with_loss_scaling(optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> updates, opt_state = tx.update(jnp.array([1.0, jnp.nan]), opt_state)
        >>> ls.keep_if_applied(opt_state, {"mean": jnp.ones(2)}, {"mean": jnp.zeros(2)})
        {'mean': Array([0., 0.], dtype=float32)}
    """
    applied = get_loss_scale_state(state).grads_finite

    def compared(new: Any, old: Any) -> Any:
        if not is_inexact(new) or jnp.shape(new) != jnp.shape(old):
            return new  # `select` raises
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    still = jax.tree.map(compared, new, old) if same_structure(new, old) else new
    return select(applied & all_finite(still, axis_name), new, old)
