"""Trace a call into a program of arrays, and keep everything else apart."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .._jax_internals import without_constants
from .._validation import describe

_ARRAY = object()  # a placeholder, since a tracer must not outlive the trace


class Staged(NamedTuple):
    """A function call, turned into a function of arrays.

    Attributes:
        jaxpr: the program, which holds no arrays. ``evaluate`` runs it.
        inputs: the arrays that the function closes over, followed by the arrays in its
            arguments.
        put_back: turns the outputs of the program into the output of the function.
    """

    jaxpr: Jaxpr
    inputs: list[jax.Array]
    put_back: Callable[[Sequence[jax.Array]], Any]


def evaluate(jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)


def staged(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Staged:
    """Trace a call.

    The function gets numbers, strings, functions and NumPy arrays unchanged, and they
    are not inputs of the program. Outputs that are not jax arrays are returned as they
    were while tracing.
    """
    given, structure = jax.tree.flatten((args, kwargs))
    inputs = {i: x for i, x in enumerate(given) if isinstance(x, jax.Array)}
    returned: list[Any] = []
    out_structure: Any = None

    def flat(inputs: dict[int, jax.Array]) -> list[jax.Array]:
        nonlocal returned, out_structure
        leaves = [inputs.get(i, x) for i, x in enumerate(given)]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        outputs, out_structure = jax.tree.flatten(fun(*args, **kwargs))
        _check_unchanged(leaves, (args, kwargs))
        returned = [_ARRAY if isinstance(x, jax.Array) else x for x in outputs]
        return [x for x in outputs if isinstance(x, jax.Array)]

    closed_jaxpr = jax.make_jaxpr(flat)(inputs)

    def put_back(arrays: Sequence[jax.Array]) -> Any:
        remaining = iter(arrays)
        leaves = [next(remaining) if x is _ARRAY else x for x in returned]
        return jax.tree.unflatten(out_structure, leaves)

    arrays = [*closed_jaxpr.consts, *inputs.values()]
    return Staged(without_constants(closed_jaxpr), arrays, put_back)


def _check_unchanged(leaves: list[Any], arguments: Any) -> None:
    known = {id(x) for x in leaves}
    for path, x in jax.tree_util.tree_leaves_with_path(arguments):
        if isinstance(x, jax.Array) and id(x) not in known:
            raise ValueError(
                "`fun` must not change its arguments, because it gets copies of them, "
                f"got {describe(x)} put into "
                f"`(args, kwargs){jax.tree_util.keystr(path)}`. Return new values, "
                "such as BatchNorm statistics or dropout counters, next to the output. "
                "Put `nnx.jit` and `nnx.remat` around the block, not inside it."
            )
