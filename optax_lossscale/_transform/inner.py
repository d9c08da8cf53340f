"""Call the wrapped transformation, and check what goes in and what comes out."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._tree import difference, dtype_of, is_inexact, same_structure
from .master_weights import has_master_weights
from .types import as_narrow_as, as_wide_as, keep_types


def update(
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Update, and return a state with exactly the types that went in.

    If an optimizer was initialized with float16 parameters, float32 gradients turn its
    moments into float32. A state whose types change cannot be the carry of a ``scan``.
    """
    try:
        new_updates, new_state = inner.update(
            as_wide_as(inner_state, updates, params), inner_state, params, **extra_args
        )
    except Exception as error:
        if params is not None:
            _check_like_params(inner, inner_state, "params", params, error)
        if params is not None or not has_master_weights(inner_state):
            grads = _as_types_of(params, updates)
            _check_like_params(inner, inner_state, "updates", grads, error)
        raise
    if not same_structure(new_state, inner_state):
        raise ValueError(
            "`inner` must keep the structure of its state, got "
            f"{jax.tree.structure(new_state)} for {jax.tree.structure(inner_state)}. "
            "`optax.monitor` changes its structure in the first step: chain it outside "
            "`with_loss_scaling`."
        )
    found = difference(new_state, inner_state)
    if found:
        # Gradients of other shapes may broadcast against the moments.
        grads = _as_types_of(params, updates)
        _check_like_params(inner, inner_state, "updates", grads, None)
        path, new, old = found
        raise ValueError(
            f"`inner` must keep the shapes of its state, but returns {new} at {path}, "
            f"where it was given {old}. A state that grows can be neither masked nor "
            "carried by `scan`. Give it its final shape in `init`."
        )
    if not has_master_weights(inner_state):
        # With master weights, updates are differences and must not be rounded.
        new_updates = as_narrow_as(new_updates, updates, params)
    return new_updates, keep_types(new_state, inner_state)


def _check_like_params(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: optax.OptState,
    name: str,
    tree: Any,
    cause: Exception | None,
) -> None:
    """Raise if ``init`` would return a state unlike the given one for a tree."""
    found = _difference_made(inner, inner_state, tree)
    if found and cause is not None:
        # Accept per-example gradients, as used for differential privacy.
        found = _difference_made(inner, inner_state, _first_example(tree))
    if found:
        path, new, old = found
        raise ValueError(
            f"`{name}` and `state` must belong together, but for a tree like `{name}`, "
            f"`init` returns {new} at {path}, and `state` has {old}. Pass gradients, "
            "parameters and state of one model and one optimizer. If either has "
            "changed, call `init` again."
        ) from cause


def _difference_made(inner: Any, inner_state: Any, tree: Any) -> Any:
    """Return where the state that ``init`` returns for a tree differs, or None."""
    try:
        made = jax.eval_shape(inner.init, tree)
    except Exception:
        return None  # Not every ``init`` accepts a tree of gradients.
    return difference(made, inner_state)


def _as_types_of(params: Any, updates: Any) -> Any:
    """Return gradients in the types of their parameters.

    The type of a parameter decides whether it has a master weight.
    """
    if not same_structure(updates, params):
        return updates

    def leaf(g: Any, p: Any) -> Any:
        both = is_inexact(g) and is_inexact(p)
        return jax.ShapeDtypeStruct(jnp.shape(g), dtype_of(p)) if both else g

    return jax.tree.map(leaf, updates, params)


def _first_example(tree: Any) -> Any:
    """Return the tree without its first axis, if all leaves have the same one."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(tree)}
    if len(sizes) != 1 or () in sizes:
        return tree
    return jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), tree)
