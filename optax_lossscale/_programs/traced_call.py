"""Trace a call into a program of arrays, and keep everything else outside."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._dtypes import is_inexact
from .._flax_internals import nnx_objects, running_model
from .._flax_internals.bound_methods import wraps
from .._flax_internals.float8_overwrites import is_overwritten
from .._jax_internals import rewriting
from .._validation import Arguments, Output, describe
from .rewrite import effect_names, without_constants

_ARRAY = object()  # marks the place of an array in the output


class TracedCall(NamedTuple):
    """A function call, turned into a function of arrays."""

    fun: Callable[..., Any]
    jaxpr: Jaxpr  # the program, which holds no arrays
    inputs: list[jax.Array]  # those in the arguments, then those closed over
    paths: list[Any]  # of the inputs in ``(args, kwargs)``; empty for other inputs
    effects: set[str]  # the names of the effects of the program
    overwritten: list[bool]  # for each input, whether its gradient is its new value
    # Turns the outputs of the program into the output of the function.
    put_back: Callable[[Sequence[jax.Array]], Any]


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
    the originals, and to the state of a Linen or Haiku model around the call.
    """
    originals = nnx_objects.objects_in((args, kwargs))
    with nnx_objects.changes_transferred():
        given = nnx_objects.as_arrays((tuple(args), dict(kwargs)))
        paths, structure = jax.tree_util.tree_flatten_with_path(given)
        # NumPy would compute with its own arrays, beside the program. Others are left
        # alone: under an eager `jax.grad`, `jnp.asarray` of a tracer is a copy.
        arrays = {
            i: x if isinstance(x, jax.Array) else jnp.asarray(x)
            for i, (_, x) in enumerate(paths)
            if isinstance(x, jax.Array) or isinstance(x, np.ndarray) and is_inexact(x)
        }
        output: Any = None

        def flat(first: Any, arrays: dict[int, jax.Array]) -> list[jax.Array]:
            nonlocal output
            leaves = [arrays.get(i, x) for i, (_, x) in enumerate(paths)]
            arguments = nnx_objects.with_objects(
                jax.tree.unflatten(structure, leaves), copies=True
            )
            changes = _watch(arguments, originals)
            with running_model.traced():
                returned = fun(*first, *arguments[0], **arguments[1])
            traced, output = _without_arrays(returned, changes())
            return traced

        # Errors of JAX name the function that it unwraps.
        vars(flat).update(__wrapped__=fun, __signature__=inspect.signature(flat))
        closed_jaxpr = jax.make_jaxpr(flat)(first, arrays)
        inputs = [*first, *arrays.values(), *closed_jaxpr.consts]
        keys = [*([()] * len(first)), *(paths[i][0] for i in arrays)]
        keys += [()] * len(closed_jaxpr.consts)
        with rewriting():
            jaxpr, bypassing = _without_bypassing(closed_jaxpr, inputs)
            effects = effect_names(jaxpr)
        overwritten = [*map(is_overwritten, keys)]

        def put_back(computed: Sequence[jax.Array]) -> Any:
            rest = iter(computed)
            all_outputs = [next(rest) if x is None else x for x in bypassing]
            return output.put_back(all_outputs)

        yield TracedCall(fun, jaxpr, inputs, keys, effects, overwritten, put_back)


def _without_bypassing(
    closed_jaxpr: ClosedJaxpr, inputs: list[jax.Array]
) -> tuple[Jaxpr, list[jax.Array | None]]:
    """Return a program without constants, and the results that it need not return.

    These are inputs that are returned unchanged, such as parameters, and constant
    scalars. Of a jnp.array(True), for example, `jax.core.eval_jaxpr` would return the
    Python number. Where the program computes a result, there is None.
    """
    jaxpr = without_constants(closed_jaxpr)
    known = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
    scalars = [x for x in jaxpr.outvars if isinstance(x, Literal)]
    known.update({id(x): jnp.asarray(x.val) for x in scalars})
    bypassing = [known.get(id(x)) for x in jaxpr.outvars]
    pairs = zip(jaxpr.outvars, bypassing, strict=True)
    return jaxpr.replace(outvars=[x for x, y in pairs if y is None]), bypassing


def on_traced_calls(
    fun: Callable[Arguments, Output],
    run: Callable[[TracedCall], Sequence[jax.Array]],
) -> Callable[Arguments, Output]:
    """Return a function that traces each call of another, and runs the program so."""

    @wraps(fun)
    def traced_fun(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        if running_model.is_initializing():
            return fun(*args, **kwargs)
        with traced_call(fun, args, kwargs) as call:
            return call.put_back(run(call))

    return traced_fun


class _Changes(NamedTuple):
    """The changes that a function has made."""

    objects: list[tuple[Any, Any]]  # NNX objects in the arguments, and their originals
    unchanged: dict[int, Any]  # the originals of the others, by the ids of the copies
    model: Any  # the new state of the Linen or Haiku model around the call, or None


def _watch(arguments: Any, originals: list[Any]) -> Callable[[], _Changes]:
    """Return a function that returns the changes made in the meantime.

    It raises if anything but NNX objects and the model around the call has changed.
    """
    before = nnx_objects.leaves_with_objects(arguments)
    again = nnx_objects.leaves_with_objects(arguments)
    # Some trees compute their leaves whenever they are flattened.
    computed = {path for path, x in before.items() if x is not again.get(path)}
    copies = nnx_objects.objects_in(arguments)
    contents = [*map(nnx_objects.contents, copies)]
    old_model = jax.tree.leaves(running_model.model_state())

    def changes() -> _Changes:
        after = before
        with contextlib.suppress(ValueError):  # raised by a used `eqx.nn.State`
            after = nnx_objects.leaves_with_objects(arguments)
        _check_unchanged(before, after, besides=computed)
        # Objects that are only read may be of a trace that forbids to write them.
        is_same = map(nnx_objects.is_same, copies, contents)
        objects = [*zip(copies, originals, is_same, strict=True)]
        changed = [(x, original) for x, original, same in objects if not same]
        unchanged = {id(x): original for x, original, same in objects if same}
        model = running_model.model_state()
        is_old = [*map(id, jax.tree.leaves(model))] == [*map(id, old_model)]
        return _Changes(changed, unchanged, None if is_old else model)

    return changes


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


class _Output(NamedTuple):
    """The output and the changes of a function, without their arrays."""

    structure: Any
    leaves: list[Any]  # in the place of an array, `_ARRAY`
    changed_objects: list[Any]  # the originals

    def put_back(self, arrays: Sequence[jax.Array]) -> Any:
        """Return the output of the function, and make its changes."""
        if self.changed_objects:
            nnx_objects.check_writable(self.changed_objects)
        remaining = iter(arrays)
        leaves = [next(remaining) if x is _ARRAY else x for x in self.leaves]
        returned, _, model = nnx_objects.with_objects(
            jax.tree.unflatten(self.structure, leaves), copies=False
        )
        if model is not None:
            running_model.set_model_state(model)
        return returned


def _without_arrays(returned: Any, changes: _Changes) -> tuple[list[Any], _Output]:
    """Take the arrays out of the output and the changes of a function."""
    everything = (returned, [x for x, _ in changes.objects], changes.model)
    given_back = nnx_objects.as_arrays(everything, changes.unchanged)
    leaves, structure = jax.tree.flatten(given_back)
    marked = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
    output = _Output(structure, marked, [x for _, x in changes.objects])
    return [x for x in leaves if isinstance(x, jax.Array)], output
