"""The types of the inner state: ``init`` settles them, and every update keeps them."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._tree import dtype_of, is_inexact, same_structure, wide_dtype

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def settled_state(
    inner: optax.GradientTransformationExtraArgs, params: optax.Params
) -> optax.OptState:
    """Return the first inner state, in types that can hold what updates return.

    Optax creates moments in the types of their parameters. The first update with
    float32 gradients widens most of them, and a state whose types change cannot be the
    carry of a ``scan``. Others stay narrow, and Adam's second moment is zero in
    float16. So moments are created as for float32 parameters. Whatever an update still
    widens, such as a state that starts as the number 0, is widened before the first
    step.
    """
    first = inner.init(params)
    state = jax.tree.map(_strong, first)

    def init(params: Any, state: Any) -> Any:
        return inner.init(_wide(params))

    def update(params: Any, state: Any) -> Any:
        return inner.update(_wide(params), state, params)[1]

    is_open = jax.tree.map(_is_open, first)
    changed = any(jax.tree.leaves(is_open))
    if changed:
        state, _ = _widened(init, params, state, is_open)
    while changed:
        state, changed = _widened(update, params, state, is_open)
    return state


def as_before(new: Any, old: Any) -> Any:
    """Return a new leaf in the dtype of the old one, never weakly typed."""
    strong = hasattr(new, "dtype") and not getattr(new, "weak_type", False)
    if strong and new.dtype == dtype_of(old):
        return new
    return jnp.asarray(new, dtype_of(old))


def keep_types(new_state: optax.OptState, state: optax.OptState) -> optax.OptState:
    """Return a new inner state in the types of the old one, or raise if it cannot."""
    rounded = ""
    pairs = jax.tree_util.tree_leaves_with_path(new_state)
    for (path, new), old in zip(pairs, jax.tree.leaves(state), strict=True):
        new_rank, rank = _rank(new), _rank(old)
        if new_rank <= rank:
            continue
        where = jax.tree_util.keystr(path) or "its root"
        if new_rank[0] > rank[0]:
            raise ValueError(
                "`inner` must keep the types of its state, but returns "
                f"{dtype_of(new)} at {where}, where it was given {dtype_of(old)}, "
                "which cannot hold it. Start with the wider type in `init`, such as "
                "`jnp.zeros(())` instead of `0`."
            )
        if _is_half(old):
            rounded = rounded or f"{where}, from {dtype_of(new)} to {dtype_of(old)}"
    if rounded:
        warnings.warn(
            f"Every update rounds the state of the wrapped optimizer at {rounded}. "
            "Moments with so few digits may ruin the training. Use the state that "
            "`init(params)` returns, or cast yours to its types.",
            stacklevel=8,  # the caller of `update`
        )
    return jax.tree.map(as_before, new_state, state)


def as_wide_as(
    state: optax.OptState, updates: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Return gradients in the types that the state was created for.

    Otherwise the branches of a ``jax.lax.cond`` in the optimizer could return different
    types. If the state is in half precision, the gradients stay as they are.
    """
    floats = [x for x in jax.tree.leaves(state) if is_inexact(x)]
    if not floats or any(map(_is_half, floats)) or not same_structure(updates, params):
        return updates
    return jax.tree.map(
        lambda g, p: _wide(g) if _are_half(g, p) else g, updates, params
    )


def as_narrow_as(
    new_updates: optax.Updates, updates: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Return updates in half precision if both gradients and parameters are.

    Optax does so on its own, but here the moments in between are float32.
    """
    if not same_structure(new_updates, updates) or not same_structure(updates, params):
        return new_updates

    def leaf(new: Any, update: Any, param: Any) -> Any:
        narrow = _are_half(update, param) and _rank(new) > _rank(update)
        return jnp.asarray(new, dtype_of(update)) if narrow else new

    return jax.tree.map(leaf, new_updates, updates, params)


def _are_half(update: Any, param: Any) -> bool:
    return _is_half(update) and dtype_of(update) == dtype_of(param)


def _is_half(x: Any) -> bool:
    return is_inexact(x) and jnp.finfo(dtype_of(x)).bits < 32


def _is_open(x: Any) -> bool:
    """Return whether updates may widen a leaf: a weakly typed or half-precision one."""
    weak = isinstance(x, bool | int | float | complex) or getattr(x, "weak_type", False)
    return weak or _is_half(x)


def _widened(
    function: Callable[[Any, Any], Any], params: Any, state: Any, is_open: Any
) -> tuple[Any, bool]:
    """Widen leaves that a function returns wider, and return whether there are any."""
    try:
        shapes = jax.eval_shape(function, params, state)
    except Exception:
        # It may need extra arguments, or a mapped axis around it.
        return state, False
    # Match by path: wide parameters have no master weights.
    shape_at = dict(jax.tree_util.tree_leaves_with_path(shapes))
    widened = jax.tree_util.tree_map_with_path(
        lambda path, x, is_open: _wider(x, shape_at.get(path, x), is_open),
        state,
        is_open,
    )
    pairs = zip(jax.tree.leaves(widened), jax.tree.leaves(state), strict=True)
    return widened, any(new is not old for new, old in pairs)


def _wider(x: Any, shape: Any, is_open: bool) -> Any:
    same_shape = jnp.shape(shape) == jnp.shape(x)
    if not (is_open and same_shape and _rank(shape) > _rank(x)):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, shape.dtype, sharding=x.sharding)
    return jnp.asarray(x, shape.dtype)


def _wide(params: Any) -> Any:
    """Return parameters in the types of their true gradients."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, wide_dtype(dtype_of(x))) if is_inexact(x) else x,
        params,
    )


def _rank(x: Any) -> tuple[int, int]:
    """Rank a type by what it can hold: by kind, and within a kind by size."""
    if hasattr(x, "dtype") or isinstance(x, bool | int | float | complex):
        dtype = dtype_of(x)
        for i, kind in enumerate(_KINDS):
            if jnp.issubdtype(dtype, kind):
                return i, dtype.itemsize
    return -1, 0  # PRNG keys, float0, and leaves that are not arrays


def _strong(x: Any) -> Any:
    """Make a weakly typed leaf strong, or the first update would and trace twice."""
    if isinstance(x, bool | int | float | complex) or getattr(x, "weak_type", False):
        return jnp.asarray(x, jnp.result_type(x))
    return x
