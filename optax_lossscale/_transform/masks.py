"""Apply or skip the inner update, in a layout that XLA compiles to fast code.

There are two layouts, with the same results:

1. The inputs of the inner transformation are sanitized, so that they are finite in a
   skipped step, and its outputs are masked with ``jnp.where``. This is always right,
   but often slow. A new moment is used twice, unmasked in the update and masked in the
   state, so XLA computes it twice and copies the old one.
2. While a program is staged, the update is evaluated equation by equation, and a leaf
   of the new state is masked where an equation defines it. If the step is applied, the
   masked value is the new one. If it is skipped, everything that is computed from it is
   masked in turn. Data flows as in the unwrapped optimizer: each moment is computed
   once and written in place.

In the second one, the inputs are sanitized only for a program that may not end on NaN:
one with loops, branches, callbacks or matrix decompositions. Otherwise the norm of the
gradients would have to wait for the check. But a NaN behind a mask would reach its
derivatives, so they are taken from the first layout.
"""

import collections
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from .._jax_internals import (
    COLLECTIVE,
    DEBUGGING,
    as_varying,
    bind,
    effect_names,
    is_staging,
    stage,
    waiting_for,
    without_constants,
)
from .._tree import choose, dtype_of, select
from .sanitized import StandIn, nonzeros, split, zeros

Leaves = Sequence[Any]

# Loops that may never end on a NaN, branches, code that XLA cannot see into, and
# library routines that iterate until they converge.
_UNSAFE = {"while", "cond", "pallas_call", "ffi_call", "eig", "eigh", "schur", "svd"}


def masked_update(
    inner_update: Callable[..., tuple[Any, optax.Updates, optax.OptState]],
    is_checked: bool,
    apply: jax.Array,
    updates: optax.Updates,
    inner_state: optax.OptState,
    extra_args: dict[str, Any],
) -> tuple[jax.Array, optax.Updates, optax.OptState]:
    """Return the update of an applied step, or zeros and the old state if skipped.

    The inner transformation always runs, so every device reaches a collective inside
    it. ``inner_update`` takes the gradients and the extra arguments. It returns whether
    its results may be used (True unless ``is_checked``), the updates and the new state.

    The first result of this function is whether the step is applied.
    """
    structure: Any = None
    leaves: Leaves | None = None
    given, sanitize, put_back = split(updates, extra_args)
    # In the types that sanitized inputs have.
    given = [as_varying(x, apply) for x in given]
    old = jax.tree.leaves(inner_state)

    def update(given: Leaves) -> Any:
        return inner_update(*put_back(given))

    def evaluate(given: Leaves) -> Leaves:
        nonlocal structure
        leaves, structure = jax.tree.flatten(update(given))
        return leaves

    if isinstance(apply, jax.core.Tracer) and is_staging():
        closed_jaxpr, shapes, leaks = stage(update, given)
        jaxpr, consts = without_constants(closed_jaxpr), closed_jaxpr.consts
        names = set(_names(jaxpr))
        if not (leaks and _has_callback(names)):
            if leaks:
                # It records values for the caller's program, so it needs some of these.
                # XLA drops what is computed only for this, except for callbacks.
                update(given)
            structure = jax.tree.structure(shapes)
            args = apply, given, consts, old
            leaves = _staged(jaxpr, names, sanitize, is_checked, *args)
    if leaves is None:
        leaves = _masked_last(evaluate, sanitize(apply, given, nonzeros), apply, old)
        if is_checked and any(isinstance(x, jax.core.Tracer) for x in leaves):
            # What the check has found must not be a NaN behind a mask.
            given = sanitize(leaves[0], given, nonzeros)
            leaves = _masked_last(evaluate, given, leaves[0], old)
    applied, new_updates, new_state = jax.tree.unflatten(structure, leaves)
    # Shaped like the output: the inner transformation may return another tree.
    no_updates = jax.tree.map(_zeros_like, new_updates)
    return applied, select(applied, new_updates, no_updates), new_state


def _masked_last(
    evaluate: Callable[[Leaves], Leaves],
    sanitized: Leaves,
    apply: jax.Array,
    old: Leaves,
) -> Leaves:
    """Evaluate the update in the first layout; return whether it is applied first."""
    usable, *leaves = evaluate(sanitized)
    apply, first = apply & usable, len(leaves) - len(old)
    return [apply, *leaves[:first], *select(apply, leaves[first:], list(old))]


def _staged(
    jaxpr: Jaxpr,
    names: set[str],
    sanitize: Callable[[jax.Array, Leaves, StandIn], Leaves],
    is_checked: bool,
    *args: Any,
) -> Leaves:
    """Evaluate the jaxpr of an update in the right layout.

    ``names`` are those in the jaxpr. ``args`` are whether to apply it, the leaves that
    may be non-finite, the constants of the jaxpr, and the leaves of the old state.
    """

    def first(
        stand_in: StandIn, apply: jax.Array, given: Leaves, consts: Leaves, old: Leaves
    ) -> Leaves:
        evaluate = functools.partial(jaxpr_as_fun(ClosedJaxpr(jaxpr, [])), *consts)
        sanitized = sanitize(apply, given, stand_in)
        return _masked_last(lambda given: evaluate(*given), sanitized, apply, old)

    def second(apply: jax.Array, given: Leaves, consts: Leaves, old: Leaves) -> Leaves:
        if is_checked:
            # Evaluate twice, or the whole new state would wait in memory for the flag.
            apply &= jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*consts, *given)[0]
            given = [waiting_for(apply, x) for x in given]
        elif not is_safe:
            given = sanitize(apply, given, stand_in)
        return _masked_early(jaxpr, apply, [*consts, *given], old)

    def derived(apply: jax.Array, *args: Leaves) -> Leaves:
        if is_checked:
            # What the check finds must not be a NaN behind a mask.
            apply = first(nonzeros, apply, *args)[0]
        return first(nonzeros, apply, *args)

    # Code on the host may divide by what it is given.
    stand_in = nonzeros if names & {"io_callback", "pure_callback"} else zeros
    if any(name.startswith("custom_vjp_call") for name in names):
        return first(nonzeros, *args)  # it has no forward mode
    if any(name.endswith("Effect") for name in names - {COLLECTIVE, *DEBUGGING}):
        return first(nonzeros, *args)  # mutable arrays, and callbacks that must happen
    unsafe = _UNSAFE | {"scan"} if is_checked else _UNSAFE  # which costs too much twice
    is_safe = not (_has_callback(names) or names & unsafe)
    if is_safe or not is_checked:
        try:
            return _with_derivatives_of(derived, second)(*args)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(
                "This step is correct, but slower than it could be: the update of the "
                "wrapped optimizer could not be evaluated equation by equation "
                f"({type(error).__name__}: {reason}). Please report this, and name the "
                "optimizer and the version of jax.",
                stacklevel=4,  # the caller of `update`
            )
    return _with_derivatives_of(derived, functools.partial(first, stand_in))(*args)


def _masked_early(
    jaxpr: Jaxpr, apply: jax.Array, inputs: Leaves, old: Leaves
) -> Leaves:
    """Evaluate a jaxpr, and mask each leaf of the new state where it is defined.

    Its outputs are a flag that is not used, the updates and the new state. These leaves
    are masked at the end:

    - inputs that are passed through, and constants: no equation defines them;
    - a variable that is two leaves of the state: it has two old values;
    - a variable whose type the mask would change;
    - scalars: this costs nothing, and a step may divide by a count whose old value is
      still 0.
    """
    first = len(jaxpr.outvars) - len(old)
    outputs = list(zip(jaxpr.outvars[first:], old, strict=True))
    defined = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    uses = collections.Counter(id(var) for var, _ in outputs)
    early = {
        id(var): x
        for var, x in outputs
        if not isinstance(var, Literal)
        and var in defined
        and uses[id(var)] == 1
        and jnp.ndim(x) > 0
        and var.aval == jax.typeof(x)
    }
    env: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        args = [read(var) for var in eqn.invars]
        before = [early.get(id(var)) for var in eqn.outvars]
        if _writes_rows(eqn) and args[0] is before[0]:
            # A mask would copy a whole history. A skipped step writes beyond its end.
            args[1] = jnp.where(apply, args[1], jnp.iinfo(args[1].dtype).max)
            before = [None]
        for var, new, x in zip(eqn.outvars, bind(eqn, args), before, strict=True):
            # Both have one type, and `jnp.where` takes longer to trace.
            env[var] = new if x is None else jax.lax.select_n(apply, x, new)
    new_state = [
        read(var) if id(var) in early else choose(apply, read(var), x)
        for var, x in outputs
    ]
    return [apply, *map(read, jaxpr.outvars[1:first]), *new_state]


def _writes_rows(eqn: JaxprEqn) -> bool:
    """Return whether an equation is ``x.at[i].set(y)``, which drops what is outside."""
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return eqn.primitive.name == "scatter" and eqn.params["mode"] == mode


def _has_callback(names: set[str]) -> bool:
    return any(name.endswith("callback") for name in names)


def _names(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the names of all primitives and effects in a program."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from effect_names(eqn)
        for parameter in jax.tree.leaves(tuple(eqn.params.values())):
            if isinstance(parameter, ClosedJaxpr):
                parameter = parameter.jaxpr
            if isinstance(parameter, Jaxpr):
                yield from _names(parameter)


def _with_derivatives_of(
    derived: Callable[..., Leaves], function: Callable[..., Leaves]
) -> Callable[..., Leaves]:
    """Return a function with the derivatives of another that has the same values.

    Neither may close over tracers.
    """

    def both(*args: Any) -> Leaves:
        leaves, structure = jax.tree.flatten(args)
        # The old state is among the constants, too. One array is one argument.
        unique = {id(x): x for x in leaves}
        at = {key: i for i, key in enumerate(unique)}
        index = [at[id(x)] for x in leaves]

        def arguments(unique: Leaves) -> Any:
            return jax.tree.unflatten(structure, [unique[i] for i in index])

        @jax.custom_jvp
        def evaluate(*unique: Any) -> Leaves:
            return function(*arguments(unique))

        @functools.partial(evaluate.defjvp, symbolic_zeros=True)
        def _(primals: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
            moves = [not isinstance(t, SymbolicZero) for t in tangents]

            def along(moving: Leaves) -> Leaves:
                rest = iter(moving)
                leaves = [
                    next(rest) if moved else x
                    for x, moved in zip(primals, moves, strict=True)
                ]
                return derived(*arguments(leaves))

            moving, directions = (
                list(itertools.compress(x, moves)) for x in (primals, tangents)
            )
            return jax.jvp(along, (moving,), (directions,))

        return evaluate(*unique.values())

    return both


def _zeros_like(x: Any) -> Any:
    """Return zeros that change no bit of any number that they are added to."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        if float(np.zeros((), dtype).real) != 0:
            raise ValueError(
                "`inner` must return updates of a type that has a zero, since skipped "
                f"steps return zeros, got {dtype}. Cast its updates to float32."
            )
        # Adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # float0 and PRNG keys have no zero, and nothing is added to them.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x
