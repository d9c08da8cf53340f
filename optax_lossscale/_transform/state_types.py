"""Keep the dtypes of the wrapped transformation's state, so ``scan`` can carry it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import Leaf, dtype_of, is_inexact, loses_range, widen
from .._tree import (
    as_strongly_typed,
    at_paths_of,
    cast_like,
    is_array,
    mismatch,
    same_structure,
)
from .._validation import warn
from .inner import filter_for
from .master_weights import has_master_weights

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def with_kept_types(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that the types of its state never change.

    A state whose types change in the first step cannot be the carry of a ``scan``. The
    state of a float16 or float8 parameter is float32: Adam's second moment would be
    zero in float16.
    """
    drop_unknown = filter_for(inner, warns=True)

    def init_fn(params: optax.Params) -> optax.OptState:
        state = inner.init(params)
        if any(map(loses_range, jax.tree.leaves(params))):
            wide_state = inner.init(widen(params))
            # By path: `with_master_weights` makes none for float32 parameters, so the
            # two trees may differ.
            wide = dict(jax.tree_util.tree_leaves_with_path(wide_state))
            state = jax.tree_util.tree_map_with_path(wide.get, state)
        return jax.tree.map(as_strongly_typed, state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        params_are_narrow = any(map(loses_range, jax.tree.leaves(params)))
        without_copies = params_are_narrow and not has_master_weights(state)
        state_is_wide = not any(map(loses_range, jax.tree.leaves(state)))
        # Make gradients and parameters as wide as the state. Otherwise the branches of
        # a `jax.lax.cond` in the optimizer could return different types:
        # https://github.com/google-deepmind/optax/issues/377
        grads = widen(updates) if state_is_wide else updates
        wide_params = widen(params) if state_is_wide and without_copies else params

        def check_shapes(cause: Exception | None) -> None:
            if params is not None:
                _check_belongs(updates, params, "updates", cause)
                _check_belongs(state, init_fn(params), "state", cause)

        extra_args = drop_unknown(extra_args)
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
                f"`inner.update` changed {path} from {old} to {new}. Make `init` "
                "return the final shape. The state of `optax.monitor` has no final "
                "shape: chain `optax.monitor` outside."
            )
        _check_types(new_state, state)
        if without_copies and same_structure(new_updates, updates):
            own = at_paths_of(updates, params)
            new_updates = jax.tree.map(_as_narrow, new_updates, updates, own)
        return new_updates, cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_narrow(update: Leaf, grad: Leaf, param: Leaf) -> Leaf:
    """Return an update in the dtype of its gradient if its parameter is also narrow."""
    both = loses_range(grad) and loses_range(param)
    return jnp.asarray(update, dtype_of(grad)) if both else update


def _check_belongs(
    tree: Any, expected: Any, name: str, cause: Exception | None
) -> None:
    """Raise if arrays of gradients or of a state do not have the expected shapes."""
    # The state of `adam` has the arrays of `adamw`, but Optax raises an error.
    only_shapes = name == "updates" or cause is None
    if found := mismatch(tree, expected, only_shapes=only_shapes):
        path, given, own = found
        advice = (
            "Pass gradients, parameters and state of one model and one optimizer. If "
            "the model, the optimizer or the set of frozen parameters has changed, "
            "call `init` again, and keep the scale: "
            "`init(params)._replace(scale_state=old.scale_state)`. For a parameter "
            "without a gradient, pass zeros, not None."
        )
        is_pair = isinstance(tree, tuple) and len(tree) == 2
        is_pair = is_pair and not mismatch(tree[1], expected, only_shapes=True)
        is_loss = is_array(tree) and jnp.shape(tree) == ()
        if name == "updates" and (is_loss or is_pair):
            advice = "`value_and_grad` returns the loss first: `loss, grads = ...`."
        raise ValueError(
            f"`{name}` and `params` must belong together, but `{name}` has {given} at "
            f"{path}, and `params` need {own}. {advice}"
        ) from cause


def _check_types(new_state: optax.OptState, state: optax.OptState) -> None:
    """Raise if the old dtypes cannot hold the new state; warn if they round it."""
    rounded = ""
    pairs = jax.tree_util.tree_leaves_with_path(new_state)
    for (path, new), old in zip(pairs, jax.tree.leaves(state), strict=True):
        if not is_array(new):
            continue
        dtype, old_dtype = dtype_of(new), dtype_of(old)
        if dtype == old_dtype:
            continue
        where = jax.tree_util.keystr(path) or "its root"
        if _kind(dtype) > _kind(old_dtype):
            raise ValueError(
                f"`inner` must keep the dtypes of its state, but returns {dtype} at "
                f"{where}, where it was given {old_dtype}, which cannot hold it. Start "
                "with the wider dtype in `init`: `jnp.zeros(())` instead of `0`."
            )
        if is_inexact(new):
            bits = min(32, jnp.finfo(dtype).bits)
            if jnp.finfo(old_dtype).bits < bits and not rounded:
                rounded = f"{where}, from {dtype} to {old_dtype}"
    if rounded:
        warn(
            f"Every update rounds the state of the wrapped optimizer at {rounded}. "
            "Moments with so few digits may ruin the training. Pass gradients in the "
            "narrower dtype, or cast the state to the wider dtype."
        )


def _kind(dtype: Any) -> int:
    """Return the rank of a type: each kind holds those below it; -1 for PRNG keys."""
    kinds = [jnp.issubdtype(dtype, kind) for kind in _KINDS]
    return kinds.index(True) if True in kinds else -1
