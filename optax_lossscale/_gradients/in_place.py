"""Let a pure function differentiate Flax NNX objects, which change in place."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

_CONTEXT = "optax_lossscale"  # by this name NNX maps copies to originals
_OBJECT = object()  # a placeholder, since an object must not outlive the trace


class Copies:
    """The Flax NNX objects in the arguments, and copies of them for one trace.

    NNX transfers every change of a copy to its original: values, variables, submodules,
    and attributes that are not arrays, such as those that ``nnx.Module.eval`` sets.
    """

    def __init__(self, args_and_kwargs: tuple[Any, Any]):
        self._objects, *self._flat = _flatten(args_and_kwargs)
        if self._objects:
            with _nnx().split_context(_CONTEXT) as context:
                self._graph, self._contents = context.split(self._objects)

    def differentiate(
        self, differentiated: Callable[..., Any], scale: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Return the output without its objects, the gradients, and the new contents.

        ``differentiated`` is a function that ``at_scale`` returned. The contents are
        those of the copies and of objects in the output.
        """
        copies: list[Any] = []
        if self._objects:
            with _nnx().merge_context(_CONTEXT, True) as context:
                copies = context.merge(self._graph, self._contents)
        args, kwargs = _put_in(copies, *self._flat)
        output, grads = differentiated(scale, args, kwargs)
        if not self._objects:
            return output, grads, ()
        returned, leaves, structure = _flatten(output)
        with _nnx().split_context(_CONTEXT) as context:
            self._graph, contents = context.split([*copies, *returned])
        leaves = [_OBJECT if _is_object(x) else x for x in leaves]
        return jax.tree.unflatten(structure, leaves), grads, contents

    def update(self, output: Any, contents: Any) -> Any:
        """Update the objects from the copies, and put those of the output back."""
        if not self._objects:
            return output
        with _nnx().merge_context(_CONTEXT, False) as context:
            merged = context.merge(self._graph, contents)
        _, *flat = _flatten(output)
        return _put_in(merged[len(self._objects) :], *flat)


@contextlib.contextmanager
def copied(args: Any, kwargs: Any) -> Iterator[Copies]:
    """Let one trace change copies of the Flax NNX objects in the arguments."""
    nnx = _nnx()
    with contextlib.nullcontext() if nnx is None else nnx.update_context(_CONTEXT):
        yield Copies((args, kwargs))


def update_objects(old: Any, new: Any) -> Any:
    """Update the objects of the old tree, and return the new tree with them in it."""
    objects, *_ = _flatten(old)
    others, *flat = _flatten(new)
    if objects:
        _nnx().update(objects, _nnx().state(others))
    return _put_in(objects, *flat)


def _flatten(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the objects in a tree, all its leaves with them, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_object)
    return [x for x in leaves if _is_object(x)], leaves, structure


def _put_in(objects: list[Any], leaves: list[Any], structure: Any) -> Any:
    remaining = iter(objects)
    leaves = [next(remaining) if x is _OBJECT or _is_object(x) else x for x in leaves]
    return jax.tree.unflatten(structure, leaves)


def _nnx() -> Any:
    """Return Flax NNX if it has been imported. Otherwise there are no objects."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    # Flax 0.10 has no `Pytree`. In later versions nothing derives from `Object`.
    return isinstance(x, getattr(nnx, "Pytree", nnx.Object) | nnx.Variable)
