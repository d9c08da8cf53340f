"""Ask whether steps were applied, and keep what the optimizer does not see."""

from typing import Any

import jax
import jax.numpy as jnp

from ._find import get_loss_scale_state
from ._finite import AxisName, all_finite
from ._state import check_single
from ._tree import is_inexact, same_structure, select


def was_applied(state: Any) -> jax.Array:
    """Return whether the last step was applied.

    A step is skipped where its gradients, or a ``value`` or ``grads_finite`` that
    `with_loss_scaling` was given with them, are not finite; with ``check_updates`` also
    where the optimizer makes a NaN or an infinity of them.

    Args:
        state: the optimizer state after the step, or whatever `get_loss_scale_state`
            takes.

    Returns:
        A boolean array of shape ``()``; True before the first step, and always under a
        rule that never skips.

    Raises:
        ValueError: if there is no loss scale in ``state``, or more than one.

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
    """Return how many steps were applied, of all that were made.

    Counters that stand outside of the optimizer count skipped steps too, such as
    ``step`` of a Flax ``TrainState`` and of ``nnx.Optimizer``.

    Args:
        state: the optimizer state, or whatever `get_loss_scale_state` takes.
        steps: how many steps there were, applied or skipped, since ``init``.

    Returns:
        An int32 array of shape ``()``: ``steps`` less ``skipped_steps`` of the state.

    Raises:
        ValueError: if there is no loss scale in ``state``, or more than one.

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
    """Return new values where the last step was applied, and made no NaN, else old.

    The optimizer protects only its own state and the weights. BatchNorm statistics and
    moving averages take the NaN of a forward pass that overflowed, also where the
    gradients are finite; counters and PRNG keys advance in skipped steps. What is
    not finite in ``old``, such as the infinity that a minimum starts from, need not be
    in ``new``.

    Args:
        state: the optimizer state after the step, or whatever `get_loss_scale_state`
            takes.
        new: any pytree, as for `select`: arrays are selected, other leaves passed on.
        old: the same before the step, of the same structure and shapes.
        axis_name: the mapped axis, or a tuple of them, over whose devices
            (``shard_map``, ``pmap``) or members (``vmap``) ``new`` has to be finite.

    Returns:
        ``new`` if the step was applied and every element is finite that is finite in
        ``old``; else ``old``, as a whole.

    Raises:
        ValueError: if there is no loss scale in ``state`` or more than one, the
            structures or shapes of ``new`` and ``old`` differ, or ``axis_name`` is not
            bound here.

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
    applied = check_single(get_loss_scale_state(state)).grads_finite

    def compared(new: Any, old: Any) -> Any:
        if not is_inexact(new) or jnp.shape(new) != jnp.shape(old):
            return new  # `select` says what is wrong
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    still = jax.tree.map(compared, new, old) if same_structure(new, old) else new
    return select(applied & all_finite(still, axis_name), new, old)
