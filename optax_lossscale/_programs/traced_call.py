"""Trace a call into a program of arrays, and keep everything else apart."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .. import _flax_internals
from .._axes import AxisName, check_axis_name
from .._dtypes import is_inexact
from .._jax_internals import collective_axes, replace, without_constants
from .._validation import describe

_ARRAY = object()  # marks the place of an array in the output


class TracedCall(NamedTuple):
    """A function call, turned into a function of arrays.

    Attributes:
        jaxpr: the program, which holds no arrays. ``evaluate`` runs it.
        inputs: the arrays in the arguments, then those that the function closes over.
        overwritten: for each input, whether its gradient is its new value.
        put_back: turns the outputs of the program into the output of the function.
    """

    jaxpr: Jaxpr
    inputs: list[jax.Array]
    overwritten: list[bool]
    put_back: Callable[[Sequence[jax.Array]], Any]


def evaluate(jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    """Run a program. With ``jax_debug_nans``, JAX names the operation of a NaN."""
    return jax.core.eval_jaxpr(jaxpr, [], *inputs)


def evaluate_with_nan(jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    """Run a program that may compute with NaN, also with ``jax_debug_nans``."""
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)


@contextlib.contextmanager
def traced_call(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: Sequence[jax.Array] = (),
) -> Iterator[TracedCall]:
    """Trace a call of a function. ``first`` are arguments that come before the others.

    Inputs and outputs of the program are jax arrays alone. Everything else that the
    function takes or returns, such as strings, stays outside of the program. The
    function gets copies of Flax NNX objects, and ``put_back`` makes the same changes to
    the originals.
    """
    with _flax_internals.changes_transferred():
        given = _flax_internals.as_arrays((tuple(args), dict(kwargs)))
        paths, structure = jax.tree_util.tree_flatten_with_path(given)
        leaves = [x for _, x in paths]
        # NumPy would compute with its own arrays, beside the program.
        arrays = {
            i: jnp.asarray(x)
            for i, x in enumerate(leaves)
            if isinstance(x, jax.Array) or isinstance(x, np.ndarray) and is_inexact(x)
        }
        returned: list[Any] = []
        out_structure: Any = None
        changed_objects: list[int] = []

        def flat(first: Any, arrays: dict[int, jax.Array]) -> list[jax.Array]:
            nonlocal returned, out_structure, changed_objects
            copies = [arrays.get(i, x) for i, x in enumerate(leaves)]
            arguments = _flax_internals.with_objects(
                jax.tree.unflatten(structure, copies), copies=True
            )
            before = _flax_internals.leaves_with_objects(arguments)
            again = _flax_internals.leaves_with_objects(arguments)
            objects = list(filter(_flax_internals.is_object, before.values()))
            contents = [*map(_flax_internals.contents, objects)]
            output = fun(*first, *arguments[0], **arguments[1])
            after = before
            with contextlib.suppress(ValueError):  # raised by a used `eqx.nn.State`
                after = _flax_internals.leaves_with_objects(arguments)
            # Some trees compute their leaves whenever they are flattened.
            computed = {path for path, x in before.items() if x is not again.get(path)}
            _check_unchanged(before, after, besides=computed)
            # Those that are only read may be of a trace that forbids to write them.
            changed_objects = [
                i
                for i, (x, old) in enumerate(zip(objects, contents, strict=True))
                if not _flax_internals.is_same(x, old)
            ]
            objects = [objects[i] for i in changed_objects]
            changed = _flax_internals.as_arrays((output, objects))
            outputs, out_structure = jax.tree.flatten(changed)
            returned = [_ARRAY if isinstance(x, jax.Array) else x for x in outputs]
            return [x for x in outputs if isinstance(x, jax.Array)]

        # Errors of JAX name the function that it unwraps.
        vars(flat).update(__wrapped__=fun, __signature__=inspect.signature(flat))
        closed_jaxpr = jax.make_jaxpr(flat)(first, arrays)
        jaxpr = without_constants(closed_jaxpr)
        inputs = [*first, *arrays.values(), *closed_jaxpr.consts]
        whole = [_flax_internals.is_overwritten(paths[i][0]) for i in arrays]
        rest = [False] * len(closed_jaxpr.consts)
        overwritten = [*[False] * len(first), *whole, *rest]
        # Inputs that are returned unchanged, such as parameters, bypass the program.
        known = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
        forwarded = [known.get(id(x)) for x in jaxpr.outvars]
        pairs = zip(jaxpr.outvars, forwarded, strict=True)
        jaxpr = replace(jaxpr, outvars=[x for x, y in pairs if y is None])

        def put_back(computed: Sequence[jax.Array]) -> Any:
            remaining = iter(computed)
            outputs = iter([next(remaining) if y is None else y for y in forwarded])
            leaves = [next(outputs) if x is _ARRAY else x for x in returned]
            if changed_objects:
                originals = _flax_internals.leaves_with_objects((args, kwargs)).values()
                objects = list(filter(_flax_internals.is_object, originals))
                _flax_internals.check_writable([objects[i] for i in changed_objects])
            changed = jax.tree.unflatten(out_structure, leaves)
            return _flax_internals.with_objects(changed, copies=False)[0]

        yield TracedCall(jaxpr, inputs, overwritten, put_back)


def refuse_effects(effects: set[str]) -> None:
    if effects:
        raise TypeError(
            f"`fun` must be free of effects such as {sorted(effects)}. Move callbacks "
            "and mutable arrays (`jax.Ref`) out of it, and return what they would hold."
        )


def check_axes(jaxpr: Jaxpr, axis_name: AxisName | None) -> None:
    """Raise if devices could communicate while they compute at different scales."""
    if axis_name is not None:
        check_axis_name(axis_name)
    axes = collective_axes(jaxpr) - set(
        axis_name if isinstance(axis_name, tuple) else [axis_name]
    )
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis that `fun` or its gradient uses, "
            f"here {sorted(axes, key=str)}, got {axis_name!r}. Otherwise "
            "gradients at different scales are summed, or some devices wait for others "
            "forever. Add the axis. It is also needed if all devices share parameters."
        )


def _check_unchanged(
    before: dict[str, Any], after: dict[str, Any], besides: set[str]
) -> None:
    for path in {**after, **before}:
        if path in besides:
            continue
        pair = [leaves.get(path) for leaves in (before, after)]
        if pair[0] is not pair[1] and any(isinstance(x, jax.Array) for x in pair):
            raise ValueError(
                "`fun` must not change its arguments, because it gets copies of them, "
                f"got {describe(pair[1])} at `(args, kwargs){path}` instead of "
                f"{describe(pair[0])}. Return new values, such as BatchNorm statistics "
                "or dropout counters, next to the output."
            )
