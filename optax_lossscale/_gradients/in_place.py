"""Objects of Flax NNX, which change in place, around a function that must be pure."""

import sys
from typing import Any

import jax


class Objects:
    """The modules, optimizers and variables of Flax NNX in a tree; there may be none.

    Those that share a variable share it in their copies, too.
    """

    def __init__(self, tree: Any):
        self._leaves, self._structure = jax.tree.flatten(tree, is_leaf=_is_object)
        self._objects = [x for x in self._leaves if _is_object(x)]

    def contents(self) -> Any:
        """Return what the objects hold, as a pytree of arrays."""
        return _nnx().state(self._objects) if self._objects else ()

    def copy(self) -> tuple["Objects", Any]:
        """Return copies of the objects, and the tree with these in it."""
        tree = self._put_in(_nnx().clone(self._objects) if self._objects else [])
        return Objects(tree), tree

    def update(self, contents: Any) -> None:
        """Let the objects themselves hold ``contents``."""
        if self._objects:
            _nnx().update(self._objects, contents)

    def update_like(self, tree: Any) -> Any:
        """Let the objects hold what those in another tree do, and return it with them.

        The other tree has the same structure. What is no object is taken from it.
        """
        other = Objects(tree)
        self.update(other.contents())
        return other._put_in(self._objects)

    def _put_in(self, objects: Any) -> Any:
        remaining = iter(objects)
        leaves = [next(remaining) if _is_object(x) else x for x in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


def _nnx() -> Any:
    """Return Flax NNX if it has been imported; without it there are no objects."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)
