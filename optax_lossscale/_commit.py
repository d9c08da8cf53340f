"""The one place that decides how a masked update is laid out for XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._tree import dtype_of, is_inexact, same_structure, select


def commit(
    inner: optax.GradientTransformationExtraArgs,
    grads_finite: jax.Array,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Update where the gradients are finite; elsewhere return zeros and the old state.

    The inner transformation always runs, so that a collective inside it is reached by
    every device. On a step to be skipped it sees zeros: a line search must not iterate
    on NaN, and a NaN behind ``jnp.where`` still reaches derivatives of the step.
    """
    updates = jax.tree.map(
        lambda g: jnp.where(grads_finite, g, jnp.zeros_like(g)) if is_inexact(g) else g,
        updates,
    )
    new_updates, new_inner_state = update(
        inner, updates, inner_state, params, extra_args
    )
    return (
        # Zeros like the output: the inner transformation may return another tree.
        select(grads_finite, new_updates, jax.tree.map(_zeros_like, new_updates)),
        select(grads_finite, new_inner_state, inner_state),
    )


def update(
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Update, and return a state of the very types that went in.

    float32 gradients make float32 moments of an optimizer that was initialised with
    float16 parameters; a state that changes its types cannot be carried by ``scan``.
    """
    new_updates, new_state = inner.update(updates, inner_state, params, **extra_args)
    if not same_structure(new_state, inner_state):
        raise ValueError(
            "`inner` must return a state of the structure that it is given, got "
            f"{jax.tree.structure(new_state)} from {jax.tree.structure(inner_state)}. "
            "`optax.monitor` is known to change it in the first step; chain it outside "
            "of `with_loss_scaling`."
        )
    return new_updates, jax.tree.map(as_before, new_state, inner_state)


def as_before(new: Any, old: Any) -> Any:
    """Give a new leaf the dtype of the old one, and never a weak type."""
    strong = hasattr(new, "dtype") and not getattr(new, "weak_type", False)
    if strong and new.dtype == dtype_of(old):
        return new
    return jnp.asarray(new, dtype_of(old))


def _zeros_like(x: Any) -> Any:
    # Neither float0 nor PRNG keys have a zero; nothing is added to them either.
    return jnp.zeros_like(x) if jnp.issubdtype(dtype_of(x), np.number) else x
