"""Programs of JAX and their equations: look into them, and write them anew.

`autocast`, its report and the masks in place are passes: functions that take a program
and return it with some equations replaced. A pass is given one equation at a time and
yields those that take its place; the variables between them stay. It works on equations
and does not run the program on other values, because a part of a program, such as the
body of a loop, cannot be traced again by itself: a collective needs its mapped axis,
and a ``shard_map`` its mesh. What a pass leaves alone also keeps its scopes, its line
and its effects.
"""

import functools
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from .primitives import CHECKPOINTS

Program = ClosedJaxpr | Jaxpr

# The names of effect classes, which jax does not export.
COLLECTIVE = "NamedAxisEffect"
DEBUGGING = frozenset({"DebugEffect", "OrderedDebugEffect"})
MUTABLE_ARRAYS = frozenset({"ReadEffect", "WriteEffect", "AccumEffect"})

NO_LINE = "?"
# Code that is not the user's. jax may be installed in any folder.
_LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(jax.__file__))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_THIS_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_CHECK = os.path.join(_THIS_PACKAGE, "_finite.py")


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


def effect_names(program: Program) -> set[str]:
    return {type(effect).__name__ for effect in program.effects}


def collective_axes(program: Program) -> set[Any]:
    """Return the mapped axes along which the devices of a program communicate."""
    effects: Any = program.effects
    return {e.name for e in effects if type(e).__name__ == COLLECTIVE}


def user_line(eqn: JaxprEqn) -> str | None:
    """Return the file, the line and the function of the user that an equation is from.

    It is the innermost line outside of installed packages, and ``NO_LINE`` if there is
    none. None if the equation is of this package, which checks gradients by a product.
    """
    traceback: Any = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    frames = [x for x in frames if not x.file_name.startswith(_LIBRARIES)]
    if frames and frames[0].file_name == _CHECK:
        return None
    for frame in frames:
        if frame.file_name.startswith(_THIS_PACKAGE):
            break  # what is outside has called this package
        if not any(folder in frame.file_name for folder in _INSTALLED):
            file = os.path.basename(frame.file_name)
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{file}:{frame.line_num} ({function})"
    return NO_LINE


def without_constants(closed_jaxpr: ClosedJaxpr) -> Jaxpr:
    """Turn the constants of a program into its last inputs.

    jax 0.12 stores constant arrays in the program. A function that refers to it would
    keep tracers alive longer than their trace.
    """
    jaxpr = closed_jaxpr.jaxpr
    return replace(jaxpr, constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])


def with_eqns(
    program: Program,
    change: Callable[[JaxprEqn], Iterable[JaxprEqn]],
    inputs: Sequence[Var] = (),
) -> Any:
    """Replace each equation by those that ``change`` returns, and append inputs.

    They may have effects of debugging.
    """
    jaxpr = jaxpr_of(program)
    eqns = [*itertools.chain.from_iterable(map(change, jaxpr.eqns))]
    effects = jaxpr.effects | _debugging_effects(eqns)
    inputs = [*jaxpr.invars, *inputs]
    return _like(program, replace(jaxpr, eqns=eqns, invars=inputs, effects=effects))


def with_programs(eqn: JaxprEqn, change: Callable[[Any], Any]) -> Any:
    """Return an equation with each program in it changed, and its new effects."""
    params = jax.tree.map(
        lambda x: change(x) if isinstance(x, Program) else x, eqn.params
    )
    effects = eqn.effects | _debugging_effects(programs_in(params))
    return replace(eqn, params=params, effects=effects)


def replace(program: Any, **fields: Any) -> Any:
    """Return a program, or an equation of one, with other fields."""
    return program.replace(**fields)


def new_var(aval: Any, dtype: Any = None) -> Var:
    """Return a new variable for a program, perhaps of another dtype."""
    if dtype is not None:
        aval = aval.update(dtype=jnp.dtype(dtype), weak_type=False)
    return Var(aval)


def eqn_like(eqn: JaxprEqn, fun: Any, inputs: Sequence[Any], output: Var) -> Any:
    """Return an equation that computes one primitive, with the context of another."""
    new = _equation(fun, *(x.aval.dtype for x in inputs))
    return replace(
        eqn,
        primitive=new.primitive,
        invars=[*inputs],
        outvars=[output],
        params=new.params,
        effects=new.effects,
    )


@functools.lru_cache
def _equation(fun: Any, *dtypes: Any) -> Any:
    """Return an equation on scalars. It is traced once, for any number of copies."""
    like = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    (eqn,) = jax.make_jaxpr(fun)(*like).jaxpr.eqns
    return eqn


def debugging_equation(fun: Any, inputs: Sequence[Any]) -> Any:
    """Return an equation that calls a function, which returns nothing, for its effect.

    The function is traced on the shapes of the inputs.
    """
    like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    (eqn,) = jax.make_jaxpr(jax.jit(fun))(*like).jaxpr.eqns
    return replace(eqn, invars=[*inputs])


def checkpointed(program: Program, policy: Callable[..., bool]) -> Any:
    """Return a program that is one ``jax.checkpoint``.

    Without ``prevent_cse``, which the bodies of loops do not need.
    """
    outer = jaxpr_of(program)
    fun = jax.checkpoint(jnp.negative, policy=policy, prevent_cse=False)
    (new,) = jax.make_jaxpr(fun)(0.0).jaxpr.eqns
    if new.primitive.name not in CHECKPOINTS:
        return program  # the flag `jax_remat3` makes another primitive
    inner = replace(outer, constvars=[], invars=[*outer.constvars, *outer.invars])
    results = [new_var(x.aval) for x in outer.outvars]
    new = replace(
        new,
        ctx=outer.eqns[0].ctx,  # such as the mesh of a `shard_map` around it
        invars=inner.invars,
        outvars=results,
        params={**new.params, "jaxpr": inner},
        effects=outer.effects,
    )
    return _like(program, replace(outer, eqns=[new], outvars=results))


def _like(program: Program, jaxpr: Any) -> Any:
    """Return a program of the same class, with the same constants."""
    # In jax 0.12 there is one class, whose attribute ``jaxpr`` is the program itself.
    if isinstance(program, Jaxpr):
        return jaxpr
    return ClosedJaxpr(jaxpr, cast(Any, program).consts)


def _debugging_effects(parts: Iterable[Any]) -> set[Any]:
    return {e for x in parts for e in x.effects if type(e).__name__ in DEBUGGING}
