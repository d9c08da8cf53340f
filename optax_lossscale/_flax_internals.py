"""Support of Flax and Haiku: objects and layers that change in place, and fp8.

Neither Flax nor Haiku is imported here. If the program does not import them, it has no
such objects.
"""

import contextlib
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_TAG = "optax_lossscale"  # by this name NNX maps copies to originals, and we know ours


def wraps(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return ``functools.wraps(fun)``, after which a method of a module stays one.

    Since Flax 0.12.1, NNX refuses to transform a bound method, because it would not see
    the module. It must see what we wrap, too. See
    https://github.com/google/flax/issues/5053.
    """
    method = fun
    while isinstance(method, functools.partial):
        method = method.func

    def wrapped(wrapper: Callable[..., Any]) -> Any:
        wrapper = functools.wraps(fun, updated=())(wrapper)
        nnx, module = _nnx(), getattr(method, "__self__", None)
        if nnx is None or not (
            inspect.ismethod(method) and isinstance(module, nnx.Module)
        ):
            return wrapper

        @functools.wraps(wrapper)
        def unbound(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs)

        signature = inspect.signature(fun)
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [self, *signature.parameters.values()]
        vars(unbound)["__signature__"] = signature.replace(parameters=parameters)
        return types.MethodType(unbound, module)

    return wrapped


def changes_transferred() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which NNX transfers changes of copies to their originals."""
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def as_arrays(tree: Any) -> Any:
    """Return a tree in which each object is a tree of its arrays."""
    if (nnx := _nnx()) is None:
        return tree

    def split(context: Any, path: Any, prefix: Any, x: Any) -> Any:
        return nnx.NodeStates.from_split(*context.split(x), metadata=_TAG)

    return nnx.to_tree(tree, split_fn=split, ctxtag=_TAG)


def with_objects(tree: Any, *, copies: bool) -> Any:
    """Undo ``as_arrays``: return copies, or the originals, changed like the copies."""
    if (nnx := _nnx()) is None:
        return tree

    def is_ours(x: Any) -> bool:  # others are of the user's own `nnx.to_tree`
        return isinstance(x, nnx.NodeStates) and x.metadata == _TAG

    leaves = dict(is_node_leaf=is_ours, is_leaf=is_ours)
    return nnx.from_tree(tree, **leaves, is_inner=copies, ctxtag=_TAG)


def contents(x: Any) -> tuple[Any, list[Any]]:
    """Return the structure and the arrays of an object, for `is_same`."""
    structure, state = _nnx().split([x])
    return structure, jax.tree.leaves(state)


def is_same(x: Any, before: tuple[Any, list[Any]]) -> bool:
    """Return whether an object holds what it held before."""
    structure, arrays = contents(x)
    return structure == before[0] and all(map(operator.is_, arrays, before[1]))


def check_writable(objects: list[Any]) -> None:
    """Raise if objects cannot be written here, before any of them is.

    Inside an NNX transformation, objects from outside of it can only be read. Flax has
    no function that tells, so each variable is written onto itself.
    """
    for _, x in _nnx().iter_graph(objects):
        if isinstance(x, _nnx().Variable):
            x.copy_from(x.copy())


def leaves_with_objects(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; objects are leaves."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_object)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def check_no_modules(differentiated: Any, others: Any) -> None:
    """Raise if changes of a module would be lost, since jax differentiates a copy.

    If a module is not differentiated, its parameters do not change.
    """
    if (nnx := _nnx()) is None:
        return

    def changes(module: Any) -> bool:
        return bool(jax.tree.leaves(nnx.state(module, nnx.Not(nnx.Param))))

    given = [(x, True) for x in jax.tree.leaves(differentiated, is_leaf=is_object)]
    given += [(x, False) for x in jax.tree.leaves(others, is_leaf=is_object)]
    for x, is_copied in given:
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
        _nnx().update([old], _nnx().state([new]))
        return old

    return jax.tree.map(updated, old, new, is_leaf=is_object)


def is_object(x: Any) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    # Flax 0.10 has no `Pytree`. In later versions nothing derives from `Object`.
    return isinstance(x, getattr(nnx, "Pytree", nnx.Object) | nnx.Variable)


def is_overwritten(path: Any) -> bool:
    """Return whether the new value of a leaf takes the place of its gradient.

    Flax puts the scales and histories of its float8 operations below this key:
    https://github.com/google/flax/pull/3435
    """
    return "['_overwrite_with_gradient']" in jax.tree_util.keystr(path)


def with_finite_overwrites(tree: Any) -> Any:
    """Return the tree, with leaves that are overwritten only by finite values.

    If the new value is not finite, the leaf keeps its old value. A skipped step does
    not protect these leaves.
    """
    if not any(is_overwritten(path) for path, _ in jax.tree.leaves_with_path(tree)):
        return tree  # NNX objects would be copied
    return jax.tree_util.tree_map_with_path(
        lambda path, x: finite_overwrite(x) if is_overwritten(path) else x, tree
    )


@jax.custom_vjp
def finite_overwrite(x: Any) -> Any:
    return x


finite_overwrite.defvjp(
    lambda x: (x, x), lambda x, new: (jnp.where(jnp.isfinite(new), new, x),)
)


def is_initializing() -> bool:
    """Return whether a Linen or Haiku model is making its parameters.

    They must not be traced apart: the model would keep the tracers.
    """
    scope, haiku = _linen_scope(), _haiku()
    if scope is not None and scope.get_flag("initializing", False):
        return True
    return haiku is not None and haiku.running_init()


def model_state() -> tuple[Any, Any]:
    """Return what the layers of a Linen or Haiku model that runs now may change.

    These are the variables of Linen, and the state and the random keys of Haiku.
    """
    scope, haiku = _linen_scope(), _haiku()
    return (
        None if scope is None else scope.root.mutable_variables(),
        None if haiku is None else _stateful().internal_state(params=False),
    )


def set_model_state(state: tuple[Any, Any]) -> None:
    variables, haiku_state = state
    if variables is not None:
        _write(_linen_scope().root.mutable_variables(), variables)
    if haiku_state is not None:
        _stateful().update_internal_state(haiku_state)


def _write(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, x in new.items():
        if isinstance(x, dict):
            _write(old[name], x)
        else:
            old[name] = x


def unwrap(tree: Any) -> Any:
    """Take arrays out of the variables that NNX wraps them in.

    ``nnx.Optimizer`` passes the same array objects to ``update``.
    """
    nnx = _nnx()
    return tree if nnx is None else (getattr(nnx, "as_pure", None) or nnx.pure)(tree)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _linen_scope() -> Any:
    """Return the scope of the Linen module that runs now, or None."""
    linen = sys.modules.get("flax.linen")
    module = linen and linen.module._context.module_stack[-1]
    return None if module is None else module.scope


def _haiku() -> Any:
    """Return Haiku inside of ``hk.transform``, and None elsewhere."""
    if haiku := sys.modules.get("haiku"):
        with contextlib.suppress(ValueError):
            haiku.running_init()
            return haiku
    return None


def _stateful() -> Any:
    return sys.modules["haiku._src.stateful"]  # Haiku deletes its attribute `_src`
