"""Uses of jax internals. Only this file handles differences between jax versions."""

import functools
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters import ad

# The names of effect classes, which jax does not export.
COLLECTIVE = "NamedAxisEffect"
DEBUGGING = frozenset({"DebugEffect", "OrderedDebugEffect"})
# Where the code is that is not the user's.
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)
NO_LINE = "?"
MUTABLE_ARRAYS = frozenset({"ReadEffect", "WriteEffect", "AccumEffect"})


def without_constants(closed_jaxpr: ClosedJaxpr) -> Jaxpr:
    """Turn the constants of a program into its last inputs.

    jax 0.12 stores constant arrays in the program. A function that refers to it would
    keep tracers alive longer than their trace.
    """
    jaxpr = closed_jaxpr.jaxpr
    return replace(jaxpr, constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])


def with_eqns(
    program: Jaxpr | ClosedJaxpr,
    change: Callable[[JaxprEqn], Iterable[JaxprEqn]],
    inputs: Sequence[Var] = (),
) -> Any:
    """Replace each equation by those that ``change`` returns, and append inputs.

    They may have effects of debugging.
    """
    jaxpr: Any = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    eqns = [*itertools.chain.from_iterable(map(change, jaxpr.eqns))]
    effects = jaxpr.effects | _debugging_effects(eqns)
    inputs = [*jaxpr.invars, *inputs]
    new = replace(jaxpr, eqns=eqns, invars=inputs, effects=effects)
    # In jax 0.12 there is one class, whose attribute ``jaxpr`` is the program itself.
    return new if jaxpr is program else ClosedJaxpr(new, cast(Any, program).consts)


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


def checkpointed(program: Jaxpr | ClosedJaxpr, policy: Callable[..., bool]) -> Any:
    """Return a program that is one ``jax.checkpoint``.

    Without ``prevent_cse``, which the bodies of loops do not need.
    """
    outer: Any = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    fun = jax.checkpoint(jnp.negative, policy=policy, prevent_cse=False)
    (new,) = jax.make_jaxpr(fun)(0.0).jaxpr.eqns
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
    outer = replace(outer, eqns=[new], outvars=results)
    same = isinstance(program, Jaxpr)
    return outer if same else ClosedJaxpr(outer, cast(Any, program).consts)


def debugging_equation(fun: Any, inputs: Sequence[Any]) -> Any:
    """Return an equation that calls a function, which returns nothing, for its effect.

    The function is traced on the shapes of the inputs.
    """
    like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    (eqn,) = jax.make_jaxpr(jax.jit(fun))(*like).jaxpr.eqns
    return replace(eqn, invars=[*inputs])


def with_effects_of(eqn: JaxprEqn, params: dict[str, Any]) -> Any:
    """Return an equation with other programs inside, and their effects of debugging."""
    effects = eqn.effects | _debugging_effects(programs_in(params))
    return replace(eqn, params=params, effects=effects)


def _debugging_effects(parts: Iterable[Any]) -> set[Any]:
    return {e for x in parts for e in x.effects if type(e).__name__ in DEBUGGING}


def programs_in(params: dict[str, Any]) -> list[Any]:
    """Return the programs among the parameters of an equation."""
    return [x for x in jax.tree.leaves(params) if isinstance(x, ClosedJaxpr | Jaxpr)]


def user_line(eqn: JaxprEqn) -> str:
    """Return the file, the line and the function of the user that an equation is from.

    It is the innermost line outside of installed packages. ``NO_LINE`` if there is
    none, or if the equation is of this package.
    """
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(os.path.dirname(__file__)):
            break
        if not frame.file_name.startswith(_INSTALLED):
            name = os.path.basename(frame.file_name)
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{name}:{frame.line_num} ({function})"
    return NO_LINE


def is_of_backward_pass(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or the one around it, transposes another."""
    return "transpose(" in str(eqn.source_info.name_stack)


def is_staging() -> bool:
    """Return whether operations are staged into a program, as under ``jax.jit``.

    Eager ``jax.vmap`` and derivatives trace too, but they run operations that do not
    depend on what they map or differentiate.
    """
    with jax.transfer_guard("allow"):  # the user may have forbidden it
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """Return the mapped axes along which an array varies, as far as jax knows.

    There are none outside ``shard_map``, or with its ``check_vma=False``.
    """
    aval: Any = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    # In jax 0.7, the type itself has the axes.
    axes = getattr(kind, "varying", getattr(aval, "vma", None))
    if axes is None and jax.sharding.get_abstract_mesh().manual_axes:
        # An empty set would let devices decide differently, without an error.
        raise RuntimeError(
            f"jax {jax.__version__} no longer reports along which mapped axes an array "
            "varies. This version of optax_lossscale relies on that. Upgrade "
            "optax_lossscale, or install an earlier jax."
        )
    return axes or frozenset()


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Mark an array as varying along the mapped axes along which another varies."""
    axes = tuple(varying_axes(like) - varying_axes(x))
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return getattr(jax.lax, "pvary")(x, axes)  # noqa: B009, its name until jax 0.8


def after(other: jax.Array, x: jax.Array) -> jax.Array:
    """Return ``x`` behind a barrier: XLA uses it only after computing ``other``."""
    if varying_axes(other) - varying_axes(x):
        return x  # behind the barrier, it would vary along these axes, too
    return jax.lax.optimization_barrier((x, varying_like(other, x)))[0]


def in_memory_of(other: Any, x: jax.Array) -> jax.Array:
    """Return ``x`` in the memory that holds another array: host or device."""
    # jax 0.7.0 has no spaces of memory.
    here, there = (getattr(jax.typeof(a), "memory_space", None) for a in (x, other))
    return x if here == there else jax.device_put(x, there)


def is_ref(x: jax.Array) -> bool:
    """Return whether an array is mutable, a ``jax.Ref``."""
    return hasattr(jax.typeof(x), "inner_aval")


def collective_axes(jaxpr: Jaxpr) -> set[Any]:
    """Return the mapped axes along which the devices of a program communicate."""
    effects: Any = jaxpr.effects
    return {e.name for e in effects if type(e).__name__ == COLLECTIVE}


def effect_names(of: ClosedJaxpr | Jaxpr) -> set[str]:
    return {type(effect).__name__ for effect in of.effects}


def zeros_like_aval(aval: Any) -> jax.Array:
    """Return zeros of an abstract type, with its sharding and its mapped axes."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.lax.full(aval.shape, 0, aval.dtype)  # `ad` would return float0
    return ad.zeros_like_aval(aval)
