"""Scale a loss and unscale its gradients, if you call ``jax.grad`` yourself."""

from typing import Any

import jax

from .._find import scale_state_in_use
from .at_scale import warn_of_narrow_loss
from .scaled_losses import note_scale_loss, note_unscale_grads
from .scaling import scale_loss_by, unscale


def scale_loss(loss: Any, state: Any) -> Any:
    """Multiply a loss by the loss scale, if you call ``jax.grad`` yourself.

    Log ``loss`` itself, not the scaled loss.

    Args:
        loss: a floating-point loss of any shape, or a pytree of losses.
        state: the state, as for `value_and_grad`.

    Returns:
        The scaled loss or losses, in float32 or wider.

    Raises:
        ValueError: as `value_and_grad`.
        TypeError: if ``loss`` is not a floating-point or complex array.

    Warns:
        UserWarning: as `value_and_grad`; if that differentiates ``loss``, too.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.scale_loss(3.0, ls.FixedLossScale(1024.0).init())
        Array(3072., dtype=float32)
    """
    scale = scale_state_in_use(state).loss_scale
    note_scale_loss(state)
    scaled = jax.tree.map(lambda x: scale_loss_by(x, scale), loss)
    jax.tree.map(warn_of_narrow_loss, loss)
    return scaled


def unscale_grads(grads: Any, state: Any) -> Any:
    """Divide the gradients of a scaled loss by the loss scale, before ``update``.

    Args:
        grads: a pytree of gradients of ``scale_loss(loss, state)``.
        state: the state that scaled this loss, from before the optimizer's ``update``.

    Returns:
        The true gradients, float16 and float8 in float32, others in their own type.
        Integers, ``float0`` and None are returned unchanged.

    Raises:
        ValueError: as `value_and_grad`.

    Warns:
        UserWarning: if ``grads`` are true already, as `value_and_grad` returns them.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.unscale_grads(jnp.float16([512.0]), ls.FixedLossScale(1024.0).init())
        Array([0.5], dtype=float32)
    """
    true_grads = unscale(grads, scale_state_in_use(state).loss_scale)
    note_unscale_grads(grads, true_grads, state)
    return true_grads
