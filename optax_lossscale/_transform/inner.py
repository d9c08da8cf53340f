"""Call the wrapped transformation, and hold it and its caller to their types."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._tree import same_structure
from .types import as_narrow_as, as_wide_as, keep_types


def with_extra_args(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation take extra arguments, and drop what it does not know."""
    # By parameters and not by type: optax.MultiSteps takes extra arguments and has
    # another type; optax.contrib.sam has the type and takes but one of them.
    parameters = list(inspect.signature(inner.update).parameters.values())
    known = {p.name for p in parameters[3:]}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def is_taken(name: str) -> bool:
        # `grads_finite` is meant for us. A line search would hand it to the loss.
        return name in known or (takes_all and name != "grads_finite")

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        taken = {name: x for name, x in extra_args.items() if is_taken(name)}
        return inner.update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def update(
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Update, and return a state of the very types that went in.

    float32 gradients make float32 moments of an optimizer that was initialized with
    float16 parameters; a state that changes its types cannot be carried by ``scan``.
    """
    try:
        new_updates, new_state = inner.update(
            as_wide_as(inner_state, updates, params), inner_state, params, **extra_args
        )
    except Exception as error:
        _check_like_params(inner, inner_state, "updates", updates, error)
        if params is not None:
            _check_like_params(inner, inner_state, "params", params, error)
        raise
    if not same_structure(new_state, inner_state):
        raise ValueError(
            "`inner` must return a state of the structure that it is given, got "
            f"{jax.tree.structure(new_state)} from {jax.tree.structure(inner_state)}. "
            "`optax.monitor` is known to change it in the first step; chain it outside "
            "of `with_loss_scaling`."
        )
    difference = _difference(new_state, inner_state)
    if difference:
        # Gradients of other shapes may broadcast against the moments.
        _check_like_params(inner, inner_state, "updates", updates, None)
        path, new, old = difference
        raise ValueError(
            "`inner` must return a state of the shapes that it is given, but returns "
            f"{new} at {path}, where it was given {old}. A state that grows can be "
            "neither masked nor carried by `scan`: give it its final shape in `init`."
        )
    new_updates = as_narrow_as(new_updates, updates, params)
    return new_updates, keep_types(new_state, inner_state)


def _check_like_params(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: optax.OptState,
    name: str,
    tree: Any,
    cause: Exception | None,
) -> None:
    """Refuse a tree of which ``init`` would make a state unlike the one given."""
    difference = _difference_made(inner, inner_state, tree)
    if difference and cause is not None:
        # Per-example gradients, as for differential privacy, are of the right model.
        difference = _difference_made(inner, inner_state, _first_example(tree))
    if difference:
        path, new, old = difference
        raise ValueError(
            f"`{name}` and `state` must belong together, but for a tree like `{name}` "
            f"`init` returns {new} at {path}, where `state` has {old}. Pass gradients, "
            "parameters and state of one model and one optimizer; where either has "
            "changed, call `init` again."
        ) from cause


def _difference_made(inner: Any, inner_state: Any, tree: Any) -> Any:
    """Say where what ``init`` makes of a tree differs from a state, if it does."""
    try:
        made = jax.eval_shape(inner.init, tree)
    except Exception:
        return None  # Not every transformation takes gradients of its parameters' tree.
    return _difference(made, inner_state)


def _first_example(tree: Any) -> Any:
    """Return the tree without a first axis that all leaves have in common."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(tree)}
    if len(sizes) != 1 or () in sizes:
        return tree
    return jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), tree)


def _difference(new_state: Any, state: Any) -> tuple[str, str, str] | None:
    """Return where a state differs from another in structure or shapes, if it does."""
    if list(map(jnp.shape, jax.tree.leaves(new_state))) == list(
        map(jnp.shape, jax.tree.leaves(state))
    ) and same_structure(new_state, state):
        return None
    new, old = _shapes(new_state), _shapes(state)
    for path in {**old, **new}:
        if old.get(path) != new.get(path):
            return path, new.get(path, "no array"), old.get(path, "none")
    return None


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"an array of shape {jnp.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
