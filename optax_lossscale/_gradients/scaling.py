"""Multiply a loss by the scale, and its gradients by the reciprocal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import dtype_of, grad_dtype, is_inexact, wide_dtype
from .._flax_internals.float8_overwrites import is_overwritten
from .._tree import Tree
from .._validation import describe, warn
from .forgotten import warn_if_divided_twice, warn_if_scaled_twice
from .notes import Note, note, note_divided, using_scale


def scale_loss(loss: Any, state: Any) -> Any:
    """Multiply a loss by the loss scale, if you call ``jax.grad`` yourself.

    Log ``loss`` itself, not the scaled loss. Scale the sum of all losses, because
    `unscale_grads` divides all of their gradients.

    Args:
        loss: a floating-point loss of any shape, or a pytree of losses.
        state: the state, as for `value_and_grad`.

    Returns:
        The scaled loss or losses, in float32 or wider.

    Raises:
        ValueError: as `value_and_grad`.
        TypeError: if ``loss`` is not a floating-point or complex array.

    Warns:
        UserWarning: as `value_and_grad`.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.scale_loss(3.0, ls.FixedLossScale(1024.0).init())
        Array(3072., dtype=float32)
    """
    call = "scale_loss(loss, opt_state)"
    with using_scale(state, Note.SCALES, call=call) as used:
        scaled = jax.tree.map(lambda x: scale_loss_by(x, used.state.loss_scale), loss)
    note(Note.SCALED, scaled)
    return scaled


def unscale_grads(grads: Tree, state: Any) -> Tree:
    """Divide the gradients of a scaled loss by the loss scale, before ``update``.

    Call it before clipping, and use the gradients that it returns.

    Args:
        grads: a pytree of gradients of ``scale_loss(loss, state)``.
        state: the state that scaled this loss, from before the optimizer's ``update``.

    Returns:
        The unscaled gradients. float16 and float8 gradients are returned as float32,
        others in their own dtype. Integers, ``float0`` and None are unchanged.

    Raises:
        ValueError: as `value_and_grad`.

    Warns:
        UserWarning: as `value_and_grad`; if ``grads`` are already unscaled, as far as
            this can be detected.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.unscale_grads(jnp.float16([512.0]), ls.FixedLossScale(1024.0).init())
        Array([0.5], dtype=float32)
    """
    call = "unscale_grads(grads, opt_state)"
    with using_scale(state, Note.DIVIDES, call=call) as used:
        warn_if_divided_twice(grads, used.raw.loss_scale)
        unscaled = unscale(grads, used.state.loss_scale)
    note_divided(unscaled, used, grads)
    return unscaled


def scale_loss_by(loss: Any, scale: jax.Array) -> jax.Array:
    """Multiply a loss by the scale, in float32 or wider."""
    if not is_inexact(loss):
        raise TypeError(
            f"The loss must be a floating-point array, got {describe(loss)}. Return "
            "one, or a pair (loss, aux) with has_aux=True."
        )
    warn_if_scaled_twice(loss, scale)
    _warn_if_narrow(loss)
    dtype = wide_dtype(dtype_of(loss))
    # A constant, even if training itself is differentiated.
    return jnp.asarray(loss, dtype) * jax.lax.stop_gradient(scale).astype(dtype)


def _warn_if_narrow(loss: Any) -> None:
    """Warn if a scale above 65504 is infinite in the dtype of the loss."""
    dtype = dtype_of(loss)
    if float(jnp.finfo(dtype).max) <= 65504.0:
        warn(
            f"The loss is {dtype}. The default loss scale grows to 2**16, which is "
            "infinite in this dtype. The gradients are then inf or NaN. Cast the "
            "inputs of the loss: `loss_fn(logits.astype(jnp.float32), labels)`. A cast "
            "of the loss itself is too late."
        )


@jax.named_scope("optax_lossscale_unscale")
def unscale(tree: Any, scale: jax.Array) -> Any:
    """Multiply by the reciprocal of the scale; see ``grad_dtype`` for the types."""
    scale = jax.lax.stop_gradient(scale)

    def leaf(path: Any, x: Any) -> Any:
        return x if is_overwritten(path) else rescale(x, scale, -1, grad_dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def rescale(
    x: Any,
    scale: jax.Array,
    power: int,
    result_dtype: Callable[[Any], Any] = lambda dtype: dtype,
) -> Any:
    """Multiply a leaf by a power of the scale, 1 or -1, in float32 or wider.

    It is rounded once, to the dtype of the result.
    """
    if not is_inexact(x):
        return x
    dtype = dtype_of(x)
    wide, result = wide_dtype(dtype), result_dtype(dtype)
    x = jnp.asarray(x, wide)
    if jnp.iscomplexobj(x):
        # Multiplied as complex numbers, they would compute 0 * inf, which is NaN.
        parts = (rescale(part, scale, power) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    factor = scale.astype(wide)
    return (x * (1 / factor if power < 0 else factor)).astype(result)
