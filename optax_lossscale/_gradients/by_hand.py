"""Scale a loss and unscale its gradients, if you call ``jax.grad`` yourself."""

from typing import Any

import jax

from .._find import get_effective_state, warn_if_constant
from .._tree import scale_loss_by, unscale


def scale_loss(loss: jax.typing.ArrayLike, state: Any) -> jax.Array:
    """Multiply a loss by the loss scale.

    Use it with `unscale_grads` if you call ``jax.grad`` yourself; otherwise use
    `value_and_grad`. Log ``loss`` itself, not the scaled loss.

    Args:
        loss: a floating-point loss of any shape.
        state: an optimizer state that contains one `LossScaleState`, or that state
            itself.

    Returns:
        The scaled loss, in float32 or wider.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one, or if a
            wrapper that belongs inside `with_loss_scaling`, such as
            ``optax.MultiSteps``, is around it.
        TypeError: if ``loss`` is not a floating-point or complex array.

    Warns:
        UserWarning: if the state is a constant of a compiled function, as for
            `value_and_grad`.

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

    Use it on the gradients of a loss that `scale_loss` returned, before the optimizer's
    ``update``, which takes true gradients.

    Args:
        grads: a pytree of gradients of ``scale_loss(loss, state)``.
        state: the state that scaled this loss, from before the optimizer's ``update``.

    Returns:
        The true gradients. Gradients in float16, bfloat16 and float8 are returned in
        float32, others in their own type. Integers, ``float0`` and None are returned
        unchanged.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one, or if a
            wrapper that belongs inside `with_loss_scaling`, such as
            ``optax.MultiSteps``, is around it.

    Warns:
        UserWarning: if the state is a constant of a compiled function, as for
            `value_and_grad`.

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
