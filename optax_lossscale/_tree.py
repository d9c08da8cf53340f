"""Operations on trees: select one of two, convert their types, compare them."""

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._dtypes import Leaf, dtype_of
from ._jax_internals import in_memory_of
from ._validation import check_flag, describe

Tree = TypeVar("Tree")


def select(pred: "jax.typing.ArrayLike", on_true: Tree, on_false: Tree) -> Tree:
    """Select one of two trees of the same structure, as ``jnp.where`` does for arrays.

    Use it for values that the optimizer does not protect in a skipped step. With
    `keep_if_applied` you need no condition of your own.

    Args:
        pred: one boolean, such as the result of `all_finite`.
        on_true: any pytree. Arrays, typed PRNG keys and numbers that differ are
            selected. Other leaves, such as functions, are returned unchanged.
        on_false: a pytree of the same structure and shapes.

    Returns:
        ``on_true`` if ``pred`` is True, ``on_false`` if it is False.

    Raises:
        ValueError: if ``pred`` is not one boolean, if the structures or shapes differ,
            or if a leaf that is not an array differs between the trees.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> old, new = {"mean": jnp.zeros(2)}, {"mean": jnp.array([1.0, jnp.inf])}
        >>> ls.select(ls.all_finite(new), new, old)
        {'mean': Array([0., 0.], dtype=float32)}
    """
    check_flag("pred", pred)
    names = "`on_true` and `on_false`"
    return select_each(itertools.repeat(pred), on_true, on_false, names)


def select_each(preds: Iterator[Any], new: Tree, old: Tree, names: str) -> Tree:
    """Select as `select` does, by one flag for each leaf, in their order."""
    # ``optax.tree.where`` broadcasts other shapes, and takes no functions as leaves.
    if not same_structure(new, old):
        raise ValueError(
            f"{names} must have the same structure, got "
            f"{jax.tree.structure(new)} and {jax.tree.structure(old)}. "
            "Select before adding or removing entries, and between containers of one "
            "class: a FrozenDict is not a dict."
        )

    def leaf(path: Any, t: Leaf, f: Leaf) -> Leaf:
        pred = next(preds)
        # An array instead of a Python flag or number would fail in the next step.
        if not any(hasattr(x, "dtype") for x in (t, f)) and (t is f or t == f):
            return t
        if is_array(t) and is_array(f) and jnp.shape(t) == jnp.shape(f):
            return where(pred, t, f)
        raise ValueError(
            f"{names} must have the same shapes, and equal leaves where they "
            f"are not arrays, got {describe(t)} and {describe(f)} at "
            f"{jax.tree_util.keystr(path) or 'the root'}. Select between two versions "
            "of one tree."
        )

    return jax.tree_util.tree_map_with_path(leaf, new, old)


def where(pred: jax.typing.ArrayLike, new: Any, old: Any) -> jax.Array:
    """Return ``jnp.where`` of two arrays, sharded like the new one.

    The result is in the memory of the old one. ``jnp.where`` moves scalars to another.
    """
    return in_memory_of(jnp.where(pred, new, as_sharded(old, new)), old)


def as_sharded(x: Any, like: Any) -> Any:
    """Reshard an array as another is, on a mesh with explicit axes."""
    old, new = jax.typeof(x).sharding, jax.typeof(like).sharding
    if old.mesh.empty or new.mesh.empty or old.spec == new.spec:
        return x
    return jax.sharding.reshard(x, new)


def is_array(x: Leaf) -> bool:
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


def cast_like(tree: Any, like: Any) -> Any:
    """Return a tree in the dtypes of another, never weakly typed.

    Unlike ``optax.tree.cast_like``, it leaves alone leaves that are not arrays.
    """

    # ``optax.tree.cast_like`` takes no Python numbers.
    def leaf(x: Leaf, like: Leaf) -> Leaf:
        same = hasattr(x, "dtype") and x.dtype == getattr(like, "dtype", None)
        if not is_array(x) or same and not getattr(x, "weak_type", False):
            return x
        return jnp.asarray(x, dtype_of(like))

    return jax.tree.map(leaf, tree, like)


def as_strongly_typed(x: Leaf) -> Leaf:
    """Return a leaf as an array that is not weakly typed; others are unchanged."""
    if isinstance(x, bool | int | float | complex) or getattr(x, "weak_type", False):
        return jnp.asarray(x, jnp.result_type(x))
    return x


def same_structure(tree: Any, other: Any) -> bool:
    structure: Any = jax.tree.structure(tree)
    return structure == jax.tree.structure(other)


def at_paths_of(tree: Any, other: Any) -> Any:
    """Replace each leaf of a tree by the leaf of another at the same path, or by 0.

    Parameters may hold leaves that have no gradient, such as functions.
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(other))
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves.get(path, 0), tree)


def mismatch(
    tree: Any, other: Any, *, only_shapes: bool = False
) -> tuple[str, Any, Any] | None:
    """Return where two trees differ in structure or shapes, or None if nowhere.

    With ``only_shapes``, the arrays have the same paths and shapes, and containers may
    be of other classes.
    """
    if not only_shapes and same_structure(tree, other):
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
        # Unlike ``jnp.shape``, it takes functions.
        if all(np.shape(x) == np.shape(y) for x, y in pairs):
            return None  # every update calls this, so the common case makes no texts
    new, old = _shapes(tree), _shapes(other)
    for path in {**old, **new}:
        if old.get(path) != new.get(path):
            texts = new.get(path, "no array"), old.get(path, "none")
            return path or "the root", *texts
    structures = jax.tree.structure(tree), jax.tree.structure(other)
    return None if only_shapes else ("the root", *structures)


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"an array of shape {jnp.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf)
    }
