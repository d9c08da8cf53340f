"""Programs of JAX and their equations: look into them, and write them anew.

`autocast`, its report and the masks in place are passes: functions that take a program
and return it with some equations replaced. A pass gets one equation at a time and
yields those that take its place; the variables between them stay. It works on equations
and does not run the program on other values, because a part of a program, such as the
body of a loop, cannot be traced again by itself: a collective needs its mapped axis,
and a ``shard_map`` its mesh. An equation that a pass leaves alone also keeps its
scopes, its line and its effects.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from .._axes import AxisName, check_axis_name
from .._jax_internals import inlined, like, rewriting
from .primitives import ELEMENTWISE, PRODUCTS, REDUCTIONS, RESHAPES

Program = ClosedJaxpr | Jaxpr

# The names of effect classes, which jax does not export.
COLLECTIVE = "NamedAxisEffect"
DEBUGGING = frozenset({"DebugEffect", "OrderedDebugEffect"})
MUTABLE_ARRAYS = frozenset({"ReadEffect", "WriteEffect", "AccumEffect"})

OPERATIONS = ELEMENTWISE | RESHAPES | REDUCTIONS | PRODUCTS


def jaxpr_of(program: Program) -> Any:
    """Return the program inside a ``ClosedJaxpr``, or another one as it is."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def programs_in(params: dict[str, Any]) -> list[Any]:
    """Return the programs among the parameters of an equation, or in tuples there."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in params.values())
    return [x for x in itertools.chain(*values) if isinstance(x, Program)]


def equations(program: Program) -> Iterator[JaxprEqn]:
    """Yield all equations of a program and of the programs inside it."""
    for eqn in program.eqns:
        yield eqn
        for inner in programs_in(eqn.params):
            yield from equations(inner)


def operations(program: Program) -> set[str]:
    """Return the names of all primitives in a program."""
    return {eqn.primitive.name for eqn in equations(program)}


def walked(
    program: Program,
    inputs: Sequence[Any],
    rule: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    default: Any,
) -> Callable[[Any], Any]:
    """Follow facts about the inputs of a program to each of its variables.

    ``rule`` takes an equation and the facts about its operands, and returns the facts
    about its results. ``default`` holds for constants. The result takes a variable.
    """
    jaxpr = jaxpr_of(program)
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Any:
        return known.get(x, default) if isinstance(x, Var) else default

    for eqn in jaxpr.eqns:
        results = rule(eqn, [*map(read, eqn.invars)])
        known.update(zip(eqn.outvars, results, strict=True))
    return read


def remembered(change: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the results for each program, so that JAX compiles each only once."""
    known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(change)
    def changed(program: Program, *options: Any) -> Any:
        results = known.setdefault(program, {})
        if options not in results:
            new = change(program, *options)
            # A program that this dictionary held itself would never go away.
            results[options] = None if new is program else new
        return program if results[options] is None else results[options]

    return changed


def effect_names(program: Program) -> set[str]:
    return {type(effect).__name__ for effect in program.effects}


def refuse_effects(effects: set[str]) -> None:
    if effects:
        raise TypeError(
            f"`fun` must be free of effects such as {sorted(effects)}. Move callbacks "
            "and mutable arrays (`jax.Ref`) out of it, and return their values instead."
        )


def check_axes(jaxpr: Jaxpr, axis_name: AxisName | None) -> None:
    """Raise if devices could communicate while they compute at different scales."""
    check_axis_name(axis_name)
    with rewriting():
        effects: Any = jaxpr.effects
        used = {e.name for e in effects if type(e).__name__ == COLLECTIVE}
    named = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axes := used.difference(named):
        raise ValueError(
            "`axis_name` must name every mapped axis that `fun` or its gradient uses, "
            f"here {sorted(axes, key=str)}, got {axis_name!r}. Otherwise "
            "gradients at different scales are summed, or some devices wait for others "
            "forever. Add the axis, even if all devices have the same parameters."
        )


def evaluate(jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    """Run a program. With ``jax_debug_nans``, JAX names the operation of a NaN."""
    return eval_jaxpr(jaxpr, [], *inputs)


def evaluate_with_nan(jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    """Run a program that may compute with NaN, even with ``jax_debug_nans``."""
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)


def as_one_equation(name: str, jaxpr: Jaxpr, *inputs: jax.Array) -> Sequence[jax.Array]:
    """Run a program that may compute with NaN as one equation, not traced again.

    A profile shows its ``name``.
    """
    eqn = empty_call(len(inputs), len(jaxpr.outvars))
    params = {**eqn.params, "jaxpr": ClosedJaxpr(jaxpr, []), "name": name}
    return eqn.primitive.bind(*inputs, **params)


def with_calls(program: Jaxpr) -> Jaxpr:
    """Make each operation a call of a program that all operations like it share.

    JAX differentiates a program once, but an operation each time that it occurs. This
    takes half of the time to trace the gradient of a model without loops. `jax.numpy`
    also makes such calls. A trace takes only their operations.
    """
    empty = functools.cache(empty_call)  # of this mesh
    # What is remembered of this program lives as long as JAX keeps it in its caches.
    with jax.disable_jit(False):
        [kept] = programs_in(jax.make_jaxpr(_nothing)().jaxpr.eqns[0].params)

    def as_call(eqn: JaxprEqn) -> Any:
        is_plain = eqn.primitive.name in OPERATIONS and not eqn.effects
        if not is_plain or programs_in(eqn.params):
            return eqn
        types, results = (
            tuple(x.aval for x in variables) for variables in (eqn.invars, eqn.outvars)
        )
        call = empty(len(types), len(results))
        items = tuple(eqn.params.items())
        shared = _with_one(kept, eqn.primitive, types, results, items, eqn.ctx)
        params = {**call.params, "jaxpr": shared, "inline": inlined()}
        return eqn.replace(primitive=call.primitive, params=params)

    return with_eqns(program, lambda eqn: [as_call(eqn)])


@jax.jit
def _nothing() -> float:
    return 0.0


@remembered
def _with_one(
    _: Any, operation: Any, types: Any, results: Any, params: Any, context: Any
) -> Any:
    """Return a program of one operation, which is not traced again."""
    call = empty_call(len(types), len(results))
    eqn = call.replace(
        primitive=operation,
        invars=[*map(new_var, types)],
        outvars=[*map(new_var, results)],
        params=dict(params),
        ctx=context,
    )
    return program_of(eqn, call)


def program_of(eqn: JaxprEqn, call: JaxprEqn) -> Any:
    """Return a program of one equation. ``call`` is an `empty_call` of its size."""
    inputs: list[Any] = [new_var(x.aval) for x in eqn.invars]
    outputs: list[Any] = [new_var(x.aval) for x in eqn.outvars]
    program = call.params["jaxpr"]
    jaxpr = jaxpr_of(program).replace(
        invars=inputs,
        outvars=outputs,
        eqns=[eqn.replace(invars=inputs, outvars=outputs)],
        effects=eqn.effects,
    )
    return like(program, jaxpr)


def empty_call(inputs: int, outputs: int) -> JaxprEqn:
    """Return a call of a program that computes nothing.

    Two calls with as many inputs and outputs, on one mesh, differ only in it.
    """

    @jax.jit
    def program(*_: jax.Array) -> list[float]:
        return [0.0] * outputs

    with jax.disable_jit(False):
        (eqn,) = jax.make_jaxpr(program)(*[0.0] * inputs).jaxpr.eqns
    return eqn


def without_constants(closed_jaxpr: ClosedJaxpr) -> Jaxpr:
    """Turn the constants of a program into its last inputs.

    jax 0.12 stores constant arrays in the program. A function that refers to it would
    keep tracers alive longer than their trace.
    """
    jaxpr = closed_jaxpr.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])


def with_eqns(
    program: Program,
    change: Callable[[JaxprEqn], Iterable[JaxprEqn]],
    inputs: Sequence[Var] = (),
) -> Any:
    """Replace each equation by those that ``change`` returns, and append inputs.

    The new equations may have debugging effects.
    """
    jaxpr = jaxpr_of(program)
    eqns = [*itertools.chain.from_iterable(map(change, jaxpr.eqns))]
    effects = jaxpr.effects | _debugging_effects(eqns)
    inputs = [*jaxpr.invars, *inputs]
    return like(program, jaxpr.replace(eqns=eqns, invars=inputs, effects=effects))


def with_programs(eqn: JaxprEqn, change: Callable[[Program], Program]) -> Any:
    """Return an equation with each program in it changed, and its new effects."""
    params = jax.tree.map(
        lambda x: change(x) if isinstance(x, Program) else x, eqn.params
    )
    effects = eqn.effects | _debugging_effects(programs_in(params))
    return eqn.replace(params=params, effects=effects)


def new_var(aval: Any, dtype: Any = None) -> Var:
    """Return a new variable for a program, perhaps of another dtype."""
    if dtype is not None:
        aval = aval.update(dtype=jnp.dtype(dtype), weak_type=False)
    return Var(aval)


def eqn_like(eqn: JaxprEqn, fun: Any, inputs: Sequence[Any], output: Var) -> Any:
    """Return an equation that computes one primitive, with the context of another."""
    new = _equation(fun, *(x.aval.dtype for x in inputs))
    return eqn.replace(
        primitive=new.primitive,
        invars=[*inputs],
        outvars=[output],
        params=new.params,
        effects=new.effects,
    )


def eqn_of(fun: Any, inputs: Sequence[Any], outputs: Sequence[Any] = ()) -> Any:
    """Return an equation that calls a function, without the context of another."""
    like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    (eqn,) = jax.make_jaxpr(jax.jit(fun))(*like).jaxpr.eqns
    return eqn.replace(invars=[*inputs], outvars=[*outputs])


@functools.lru_cache
def _equation(fun: Any, *dtypes: Any) -> Any:
    """Return an equation on scalars. It is traced once, for any number of copies."""
    like = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    (eqn,) = jax.make_jaxpr(fun)(*like).jaxpr.eqns
    return eqn


def _debugging_effects(parts: Iterable[Any]) -> set[Any]:
    return {e for x in parts for e in x.effects if type(e).__name__ in DEBUGGING}
