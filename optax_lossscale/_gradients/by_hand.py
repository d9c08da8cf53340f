"""Scale and unscale, for loops that differentiate by themselves."""

from typing import Any

import jax

from .._find import get_effective_state, warn_if_constant
from .._tree import scale_loss_by, unscale


def scale_loss(loss: jax.typing.ArrayLike, state: Any) -> jax.Array:
    """Multiply a loss by the loss scale, for loops that differentiate it themselves.

    Args:
        loss: a floating-point loss of any shape.
        state: an optimizer state with one `LossScaleState` in it, or that state.

    Returns:
        The scaled loss, in float32 or wider. Report ``loss`` itself, not this.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.
        TypeError: if ``loss`` is not a floating-point or complex array.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> opt_state = ls.with_loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
        >>> def scaled_loss_fn(w):
        ...     return ls.scale_loss(jnp.sum(w**2), opt_state)
        >>> ls.unscale_grads(jax.grad(scaled_loss_fn)(jnp.ones(2)), opt_state)
        Array([2., 2.], dtype=float32)
    """
    scale_state = get_effective_state(state)
    warn_if_constant(scale_state)
    return scale_loss_by(loss, scale_state.loss_scale)


def unscale_grads(grads: Any, state: Any) -> Any:
    """Divide the gradients of a scaled loss by the loss scale.

    Args:
        grads: a pytree of gradients of ``scale_loss(loss, state)``.
        state: the state that scaled that loss, before the optimizer's ``update``.

    Returns:
        The true gradients: float16, bfloat16 and float8 in float32, others in their
        own type. Integers, ``float0`` and None are left as they are.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> state = ls.FixedLossScale(1024.0).init()
        >>> ls.unscale_grads({"w": jnp.float16([512.0]), "b": None}, state)
        {'b': None, 'w': Array([0.5], dtype=float32)}
    """
    scale_state = get_effective_state(state)
    warn_if_constant(scale_state)
    return unscale(grads, scale_state.loss_scale)
