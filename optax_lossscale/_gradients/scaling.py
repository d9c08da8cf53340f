"""Multiply a loss by the scale, and its gradients by the reciprocal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._precision import dtype_of, grad_dtype, is_inexact, wide_dtype
from .._validation import describe


def scale_loss_by(loss: Any, scale: jax.Array) -> jax.Array:
    """Multiply a loss by the scale, in float32 or wider."""
    if not is_inexact(loss):
        raise TypeError(
            f"The loss must be a floating-point array, got {describe(loss)}. Return "
            "one, or a pair (loss, aux) with has_aux=True."
        )
    dtype = wide_dtype(dtype_of(loss))
    # The scale is a constant, even if training itself is differentiated.
    return jnp.asarray(loss, dtype) * jax.lax.stop_gradient(scale).astype(dtype)


def unscale(tree: Any, scale: jax.Array) -> Any:
    """Multiply by the reciprocal of the scale; see ``grad_dtype`` for the types."""
    # The scale is a constant here, too.
    scale = jax.lax.stop_gradient(scale)

    def leaf(path: Any, x: Any) -> Any:
        if is_overwritten(path):
            return x
        return multiply(x, lambda dtype: 1 / scale.astype(dtype), grad_dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def is_overwritten(path: Any) -> bool:
    """Return whether a leaf's gradient is not one, but the new value of the leaf.

    Flax puts the scales and histories of its float8 operations below this key.
    """
    return any(getattr(x, "key", None) == "_overwrite_with_gradient" for x in path)


def with_finite_overwrites(tree: Any) -> Any:
    """Return the same tree, in whose gradients a new value that is not finite is old.

    In a skipped step, nothing else keeps it from being stored.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not any(is_overwritten(path) for path, _ in leaves):
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, x: finite_overwrite(x) if is_overwritten(path) else x, tree
    )


@jax.custom_vjp
def finite_overwrite(x: Any) -> Any:
    return x


finite_overwrite.defvjp(
    lambda x: (x, x), lambda x, new: (jnp.where(jnp.isfinite(new), new, x),)
)


def multiply(
    tree: Any,
    factor: Callable[[Any], jax.Array],
    result_dtype: Callable[[Any], Any] = lambda dtype: dtype,
) -> Any:
    """Multiply each leaf in float32 or wider, and round once to the result's type."""

    def leaf(x: Any) -> Any:
        if not is_inexact(x):
            return x
        dtype = dtype_of(x)
        x = jnp.asarray(x, wide_dtype(dtype))
        if jnp.iscomplexobj(x):
            # A complex product would compute 0 * inf, and turn inf into NaN.
            return jax.lax.complex(leaf(x.real), leaf(x.imag))
        return (x * factor(x.dtype)).astype(result_dtype(dtype))

    return jax.tree.map(leaf, tree)
