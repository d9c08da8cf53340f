"""Call the wrapped transformation, and keep the types of its state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._precision import as_type, dtype_of, is_inexact, is_narrow
from .._state import strong
from .._tree import at_paths_of, cast_like, mismatch, same_structure, shape_mismatch
from .._warn import warn
from .master_weights import has_master_weights

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def with_kept_types(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that the types of its state never change.

    A state whose types change in the first step cannot be the carry of a ``scan``. What
    belongs to a float16 or float8 parameter is float32, as for a float32 parameter:
    Adam's second moment is zero in float16.
    """

    def init_fn(params: optax.Params) -> optax.OptState:
        state = inner.init(params)
        if any(map(is_narrow, jax.tree.leaves(params))):
            wide_state = inner.init(_widened(params))
            # Match by path: wide parameters have no master weights.
            wide = dict(jax.tree_util.tree_leaves_with_path(wide_state))
            state = jax.tree_util.tree_map_with_path(wide.get, state)
        return jax.tree.map(strong, state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        grads, wide_params = updates, params
        # All are as wide as the state, or the branches of a `jax.lax.cond` in the
        # optimizer could return different types.
        if not any(map(is_narrow, jax.tree.leaves(state))):
            grads = _widened(updates)
            if not has_master_weights(state):
                wide_params = _widened(params)

        def check_shapes(cause: Exception | None) -> None:
            if params is not None:
                _check_belongs(updates, params, "updates", cause)
                _check_belongs(state, init_fn(params), "state", cause)

        try:
            new_updates, new_state = inner.update(
                grads, state, wide_params, **extra_args
            )
        except Exception as error:
            check_shapes(error)
            raise
        if found := mismatch(new_state, state):
            # Gradients of other shapes may broadcast against the moments.
            check_shapes(None)
            path, new, old = found
            raise ValueError(
                "`inner` must keep the structure and the shapes of its state, but "
                f"returns {new} at {path}, where it was given {old}. Give it its final "
                "shape in `init`. `optax.monitor` never has one: chain it outside "
                "`with_loss_scaling`."
            )
        _check_types(new_state, state)
        if same_structure(new_updates, updates) and not has_master_weights(state):
            own = at_paths_of(updates, params)
            new_updates = jax.tree.map(_as_narrow, new_updates, updates, own)
        return new_updates, cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _widened(tree: Any) -> Any:
    return jax.tree.map(lambda x: as_type(x, jnp.float32) if is_narrow(x) else x, tree)


def _as_narrow(update: Any, grad: Any, param: Any) -> Any:
    """Return an update in the type of its gradient if its parameter is narrow, too."""
    both = is_narrow(grad) and is_narrow(param)
    return jnp.asarray(update, dtype_of(grad)) if both else update


def _check_belongs(
    tree: Any, expected: Any, name: str, cause: Exception | None
) -> None:
    """Raise if arrays of gradients or of a state do not have the expected shapes."""
    if found := shape_mismatch(tree, expected):
        path, given, own = found
        raise ValueError(
            f"`{name}` and `params` must belong together, but `{name}` has {given} at "
            f"{path or 'the root'}, and `params` need {own}. Pass gradients, "
            "parameters and state of one model and one optimizer. If either has "
            "changed, call `init` again. A parameter without a gradient needs zeros, "
            "not None."
        ) from cause


def _check_types(new_state: optax.OptState, state: optax.OptState) -> None:
    """Raise if the old types cannot hold the new state; warn if they round it."""
    rounded = ""
    pairs = jax.tree_util.tree_leaves_with_path(new_state)
    for (path, new), old in zip(pairs, jax.tree.leaves(state), strict=True):
        where = jax.tree_util.keystr(path) or "its root"
        if _kind(new) > _kind(old):
            raise ValueError(
                "`inner` must keep the types of its state, but returns "
                f"{dtype_of(new)} at {where}, where it was given {dtype_of(old)}, "
                "which cannot hold it. Start with the wider type in `init`, such as "
                "`jnp.zeros(())` instead of `0`."
            )
        if is_inexact(new) and jnp.finfo(dtype_of(old)).bits < min(
            32, jnp.finfo(dtype_of(new)).bits
        ):
            rounded = rounded or f"{where}, from {dtype_of(new)} to {dtype_of(old)}"
    if rounded:
        warn(
            f"Every update rounds the state of the wrapped optimizer at {rounded}. "
            "Moments with so few digits may ruin the training. Pass gradients of the "
            "narrower type, or cast the state to the wider one."
        )


def _kind(x: Any) -> int:
    """Rank what a type can hold; -1 for PRNG keys and leaves that are not arrays."""
    is_number = hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)
    kinds = [jnp.issubdtype(dtype_of(x), kind) for kind in _KINDS if is_number]
    return kinds.index(True) if True in kinds else -1
