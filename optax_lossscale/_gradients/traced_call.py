"""Trace a call into a program of arrays, and keep everything else apart."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .._devices import AxisName, check_axis_name
from .._jax_internals import COLLECTIVE, without_constants
from .._validation import describe

_ARRAY = object()  # a placeholder, since a tracer must not outlive the trace


class TracedCall(NamedTuple):
    """A function call, turned into a function of arrays.

    Attributes:
        jaxpr: the program, which holds no arrays. ``evaluate`` runs it.
        inputs: the arrays that the function closes over, then those in its arguments.
        put_back: turns the outputs of the program into the output of the function.
    """

    jaxpr: Jaxpr
    inputs: list[jax.Array]
    put_back: Callable[[Sequence[jax.Array]], Any]


def evaluate(jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)


def traced_call(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> TracedCall:
    """Trace a call. Only jax arrays are inputs and outputs of the program.

    All else reaches the function unchanged, and is returned as it was while tracing.
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
    return TracedCall(without_constants(closed_jaxpr), arrays, put_back)


def refuse_effects(effects: set[str]) -> None:
    if effects:
        raise TypeError(
            f"`fun` must be free of effects such as {sorted(effects)}. Move callbacks "
            "and mutable arrays (`jax.Ref`) out of it, and return what they would hold."
        )


def check_axes(jaxpr: Jaxpr, axis_name: AxisName | None) -> None:
    """Raise if devices that compute at different scales would communicate."""
    if axis_name is not None:
        check_axis_name(axis_name)
    effects: Any = jaxpr.effects
    used = {e.name for e in effects if type(e).__name__ == COLLECTIVE}
    axes = used - set(axis_name if isinstance(axis_name, tuple) else [axis_name])
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis that `fun` or its gradient uses, "
            f"here {sorted(axes, key=str)}, got {axis_name!r}. Otherwise "
            "gradients at different scales are summed, or some devices wait for others "
            "forever. Add the axis. It is also needed if all devices share parameters."
        )


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
