"""Objects of Flax NNX: as trees of arrays, and changed in place."""

import contextlib
import dataclasses
import operator
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax

_TAG = "optax_lossscale"  # by this name NNX maps copies to originals, and we know ours


@dataclasses.dataclass
class _Unchanged:
    """Stands for an object that is returned, but must not be written."""

    original: Any


def flax_nnx() -> Any:
    return sys.modules.get("flax.nnx")


def changes_transferred() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which NNX transfers changes of copies to their originals."""
    nnx = flax_nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def as_arrays(tree: Any, unchanged: Mapping[int, Any] = {}) -> Any:
    """Return a tree in which each object is a tree of its arrays.

    An object whose id is in ``unchanged`` becomes the original there.
    """
    if (nnx := flax_nnx()) is None:
        return tree

    def split(context: Any, path: Any, prefix: Any, x: Any) -> Any:
        if id(x) in unchanged:
            return _Unchanged(unchanged[id(x)])
        return nnx.NodeStates.from_split(*context.split(x), metadata=_TAG)

    return nnx.to_tree(tree, split_fn=split, ctxtag=_TAG)


def without_own(path: str) -> str:
    """Return a path in ``as_arrays`` without NNX's own keys: states, 0 and value.

    They are around the path of a module, or behind that of a variable in a state.
    """
    return re.sub(r"(^|/)states/0/(.*?)/?value$", r"\1\2", path).strip("/")


def with_objects(tree: Any, *, copies: bool) -> Any:
    """Undo ``as_arrays``: return copies, or the originals, changed like the copies."""
    if (nnx := flax_nnx()) is None:
        return tree

    def is_ours(x: Any) -> bool:  # others are of the user's own `nnx.to_tree`
        is_split = isinstance(x, nnx.NodeStates) and x.metadata == _TAG
        return is_split or isinstance(x, _Unchanged)

    def merge(context: Any, path: Any, prefix: Any, x: Any) -> Any:
        if isinstance(x, _Unchanged):
            return x.original
        return context.merge(x.graphdef, *x.states)

    options = dict(is_node_leaf=is_ours, is_leaf=is_ours, merge_fn=merge)
    return nnx.from_tree(tree, **options, is_inner=copies, ctxtag=_TAG)


def contents(x: Any) -> tuple[Any, list[Any]]:
    """Return the structure and the arrays of an object, for `is_same`."""
    structure, state = flax_nnx().split([x])
    return structure, jax.tree.leaves(state)


def is_same(x: Any, before: tuple[Any, list[Any]]) -> bool:
    """Return whether an object still has the same contents."""
    structure, arrays = contents(x)
    return structure == before[0] and all(map(operator.is_, arrays, before[1]))


def check_writable(objects: list[Any]) -> None:
    """Raise if objects cannot be written here, before any of them is.

    Inside an NNX transformation, objects from outside of it can only be read. Flax has
    no function for this, so each variable is written onto itself.
    """
    for _, x in flax_nnx().iter_graph(objects):
        if isinstance(x, flax_nnx().Variable):
            x.copy_from(x.copy())


def leaves_with_objects(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; objects are leaves."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_object)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def check_no_modules(differentiated: Any, others: Any) -> None:
    """Raise if changes of a module would be lost, since jax differentiates a copy.

    If a module is not differentiated, its parameters do not change.
    """
    if (nnx := flax_nnx()) is None:
        return

    def changes(module: Any) -> bool:
        return bool(jax.tree.leaves(nnx.state(module, nnx.Not(nnx.Param))))

    leaves = [(x, True) for x in leaves_with_objects(differentiated).values()]
    leaves += [(x, False) for x in leaves_with_objects(others).values()]
    for x, is_copied in leaves:
        if isinstance(x, nnx.Module) and (is_copied or changes(x)):
            raise TypeError(
                "`value_and_grad` must be `nnx.value_and_grad` for an `nnx.Module`, "
                f"got `jax.value_and_grad` for a {type(x).__name__}, whose statistics "
                "would never change. Pass `value_and_grad=nnx.value_and_grad`."
            )


def update_objects(old: Any, new: Any) -> Any:
    """Update the objects of the old tree, and return the new tree with them in it."""

    def updated(old: Any, new: Any) -> Any:
        if not is_object(old):
            return new
        flax_nnx().update([old], flax_nnx().state([new]))
        return old

    return jax.tree.map(updated, old, new, is_leaf=is_object)


def objects_in(tree: Any) -> list[Any]:
    return list(filter(is_object, leaves_with_objects(tree).values()))


def is_object(x: Any) -> bool:
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def unwrap(tree: Any) -> Any:
    """Take arrays out of the variables that NNX wraps them in.

    ``nnx.Optimizer`` passes the same array objects to ``update``.
    """
    nnx = flax_nnx()
    return tree if nnx is None else (getattr(nnx, "as_pure", None) or nnx.pure)(tree)
