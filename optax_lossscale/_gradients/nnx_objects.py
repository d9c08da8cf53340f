"""Flax NNX objects, which change in place, around a program that only has arrays."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax

_TAG = "optax_lossscale"  # by this name NNX maps copies to originals


def changes_transferred() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which NNX transfers changes of copies to their originals."""
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def as_arrays(tree: Any) -> Any:
    """Replace each object in a tree by a tree of its arrays."""
    nnx = _nnx()
    return tree if nnx is None else nnx.to_tree(tree, ctxtag=_TAG)


def on_copies(
    fun: Callable[[Any, Any], tuple[Any, Any]], arguments: Any
) -> tuple[Any, Any, Any]:
    """Call ``fun(args, kwargs)`` on copies of the objects, given ``as_arrays`` of both.

    Return the arrays from which ``output_of`` makes the first result and changes the
    originals, then both results as they are.
    """
    args, kwargs = _with_objects(arguments, copies=True)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_object)
    objects = list(filter(_is_object, leaves))
    output, rest = fun(args, kwargs)
    return as_arrays((objects, output)), output, rest


def output_of(changed: Any) -> Any:
    """Change the original objects as the copies were, and return the output."""
    _, output = _with_objects(changed, copies=False)
    return output


def _with_objects(tree: Any, *, copies: bool) -> Any:
    """Undo ``as_arrays`` with copies, or with the originals changed like the copies."""
    nnx = _nnx()
    return tree if nnx is None else nnx.from_tree(tree, is_inner=copies, ctxtag=_TAG)


def check_no_modules(arguments: Any) -> None:
    """Raise if jax would differentiate a copy of a module, whose changes are lost."""
    module = getattr(_nnx(), "Module", ())
    for x in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, module)):
        if isinstance(x, module):
            raise TypeError(
                "`value_and_grad` must be `nnx.value_and_grad` for an `nnx.Module`, "
                f"got `jax.value_and_grad` for a {type(x).__name__}, whose statistics "
                "would never change. Pass `value_and_grad=nnx.value_and_grad`."
            )


def update_objects(old: Any, new: Any) -> Any:
    """Update the objects of the old tree, and return the new tree with them in it."""

    def updated(old: Any, new: Any) -> Any:
        if not _is_object(old):
            return new
        _nnx().update([old], _nnx().state([new]))
        return old

    return jax.tree.map(updated, old, new, is_leaf=_is_object)


def _nnx() -> Any:
    """Return Flax NNX if it has been imported. Otherwise there are no objects."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    # Flax 0.10 has no `Pytree`. In later versions nothing derives from `Object`.
    return isinstance(x, getattr(nnx, "Pytree", nnx.Object) | nnx.Variable)
