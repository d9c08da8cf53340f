"""Call the wrapped transformation, and hold it and its caller to their types."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._tree import dtype_of, same_structure


def with_extra_args(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation take extra arguments, and drop what it does not know."""
    parameters = list(inspect.signature(inner.update).parameters.values())
    # optax.MultiSteps takes extra arguments and does not say so by its type.
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    # optax.contrib.sam says so, and takes but one after updates, state and params.
    known = {p.name for p in parameters[3:]}

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        taken = {name: extra_args[name] for name in known & extra_args.keys()}
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

    float32 gradients make float32 moments of an optimizer that was initialised with
    float16 parameters; a state that changes its types cannot be carried by ``scan``.
    """
    try:
        call = functools.partial(inner.update, updates, inner_state, params)
        new_updates, new_state = _call(call, extra_args)
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
        raise ValueError(
            "`inner` must return a state of the shapes that it is given, but "
            f"this one has {difference}. A state that grows can be neither masked nor "
            "carried by `scan`: give it its final shape in `init`."
        )
    return new_updates, jax.tree.map(as_before, new_state, inner_state)


def _call(
    inner_update: Callable[..., tuple[optax.Updates, optax.OptState]],
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    try:
        return inner_update(**extra_args)
    except TypeError as error:
        # A line search hands every extra argument to the loss, and refuses those that
        # the loss does not name. This one is meant for us.
        if "'grads_finite'" not in str(error):
            raise
    return inner_update(**{k: v for k, v in extra_args.items() if k != "grads_finite"})


def as_before(new: Any, old: Any) -> Any:
    """Give a new leaf the dtype of the old one, and never a weak type."""
    strong = hasattr(new, "dtype") and not getattr(new, "weak_type", False)
    if strong and new.dtype == dtype_of(old):
        return new
    return jnp.asarray(new, dtype_of(old))


def _check_like_params(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: optax.OptState,
    name: str,
    tree: Any,
    cause: Exception | None,
) -> None:
    """Refuse a tree of which ``init`` would make a state unlike the one given."""
    try:
        made = jax.eval_shape(inner.init, tree)
    except Exception:
        return  # Not every transformation takes gradients of its parameters' tree.
    difference = _difference(made, inner_state)
    if difference:
        raise ValueError(
            f"`{name}` and `state` must belong together, but of a tree like `{name}` "
            f"`init` makes {difference}. Pass gradients, parameters and state of one "
            "model and one optimizer; where either has changed, call `init` again."
        ) from cause


def _difference(new_state: Any, state: Any) -> str:
    """Say where a state differs from another in structure or shapes, if it does."""
    if list(map(jnp.shape, jax.tree.leaves(new_state))) == list(
        map(jnp.shape, jax.tree.leaves(state))
    ) and same_structure(new_state, state):
        return ""
    new, old = _shapes(new_state), _shapes(state)
    for path in {**old, **new}:
        if old.get(path) != new.get(path):
            return (
                f"{new.get(path, 'nothing')} at {path} instead of "
                f"{old.get(path, 'nothing')}"
            )
    return ""


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"an array of shape {jnp.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
