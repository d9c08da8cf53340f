"""Apply or skip an update, in a layout that XLA compiles to fast code.

There are two layouts, with the same results:

- **Late masks.** The inputs of the update are sanitized, so that they are finite in a
  skipped step, and its outputs are masked with ``jnp.where``. This is always right, but
  often slow on a CPU. A new moment is used twice, unmasked in the update and masked in
  the state, so XLA computes it twice and copies the old one.
- **Early masks.** While a program is staged, the update is evaluated equation by
  equation, and a leaf of the new state is masked where an equation defines it. If the
  step is applied, the masked value is the new one. If it is skipped, everything that is
  computed from it is masked in turn. Data flows as in the unwrapped optimizer: each
  moment is computed once and written in place.

Early masks are for programs that end on any numbers: a NaN, or an old moment beside a
new one. Loops, branches, callbacks and matrix decompositions may not. The derivatives
of early masks are those of late ones, since a NaN behind a mask would reach them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .._gradients.derivatives import with_derivatives_of
from .._jax_internals import (
    COLLECTIVE,
    DEBUGGING,
    as_varying,
    effect_names,
    is_staging,
    stage,
    waiting_for,
    without_constants,
)
from .._precision import dtype_of
from .._tree import select
from .early_masks import masked_early
from .sanitized import StandIn, nonzeros, split, zeros

Leaves = Sequence[Any]
# Whether to apply the update, the leaves that may be non-finite, and what to put there.
Sanitize = Callable[[jax.Array, Leaves, StandIn], Leaves]

# Loops that may never end, branches, code that XLA cannot see into, and library
# routines that iterate until they converge.
_UNSAFE = {"while", "cond", "pallas_call", "ffi_call", "eig", "eigh", "schur", "svd"}


def masked_update(
    update: Callable[..., tuple[jax.Array, optax.Updates, optax.OptState]],
    is_checked: bool,
    apply: jax.Array,
    grads: optax.Updates,
    state: optax.OptState,
    extra_args: dict[str, Any],
) -> tuple[jax.Array, optax.Updates, optax.OptState]:
    """Return the update of an applied step, or zeros and the old state if skipped.

    ``update`` takes the gradients and the extra arguments. It returns whether its
    results may be used (True unless ``is_checked``), the updates and the new state. It
    always runs, so every device reaches a collective inside it.

    The first result of this function is whether the step is applied.
    """
    structure: Any = None
    given, sanitize, put_back = split(grads, extra_args)
    # In the types that sanitized inputs have.
    given = [as_varying(x, apply) for x in given]
    old = jax.tree.leaves(state)

    def evaluate(given: Leaves) -> Leaves:
        nonlocal structure
        leaves, structure = jax.tree.flatten(update(*put_back(given)))
        return leaves

    layout = None
    if isinstance(apply, jax.core.Tracer) and is_staging():
        program, leaks = stage(evaluate, given)
        jaxpr, consts = without_constants(program), program.consts
        names = set(_names(jaxpr))
        if not (leaks and _calls_host(names)):
            if leaks:
                # It may record values for the caller's program, so it runs in that,
                # too. XLA drops what is computed only for this, except for callbacks.
                evaluate(given)
            layout = _layout(jaxpr, names, sanitize, is_checked)
    if layout is None:
        is_traced = any(isinstance(x, jax.core.Tracer) for x in [apply, *given, *old])
        again = is_checked and is_traced
        leaves = _masked_late(evaluate, sanitize, nonzeros, again, apply, given, old)
    else:
        leaves = layout(apply, given, consts, old)
    applied, new_updates, new_state = jax.tree.unflatten(structure, leaves)
    # Shaped like the output: the inner transformation may return another tree.
    no_updates = jax.tree.map(_zeros_like, new_updates)
    return applied, select(applied, new_updates, no_updates), new_state


def _masked_late(
    evaluate: Callable[[Leaves], Leaves],
    sanitize: Sanitize,
    stand_in: StandIn,
    again: bool,
    apply: jax.Array,
    given: Leaves,
    old: Leaves,
) -> Leaves:
    """Evaluate an update with late masks; return whether it is applied first.

    If it is evaluated ``again``, then with inputs that are sanitized after its check,
    too: what the check has found must not be a NaN behind a mask in derivatives.
    """
    usable, *leaves = evaluate(sanitize(apply, given, stand_in))
    apply &= usable
    if again:
        _, *leaves = evaluate(sanitize(apply, given, stand_in))
    first = len(leaves) - len(old)
    return [apply, *leaves[:first], *select(apply, leaves[first:], list(old))]


def _layout(
    jaxpr: Jaxpr, names: set[str], sanitize: Sanitize, is_checked: bool
) -> Callable[..., Leaves]:
    """Return the masked update that a program defines, in the right layout.

    ``names`` are those in the program. The result takes whether to apply the update,
    the leaves that may be non-finite, the constants of the program, and the leaves of
    the old state.
    """
    program = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))

    def late(
        stand_in: StandIn,
        again: bool,
        apply: jax.Array,
        given: Leaves,
        consts: Leaves,
        old: Leaves,
    ) -> Leaves:
        return _masked_late(
            lambda given: program(*given, *consts),
            *(sanitize, stand_in, again),
            *(apply, given, old),
        )

    def early(apply: jax.Array, given: Leaves, consts: Leaves, old: Leaves) -> Leaves:
        if is_checked:
            # Evaluate twice, or the whole new state would wait in memory for the flag.
            # Printed once, by the second evaluation.
            eqns = [
                eqn
                for eqn in jaxpr.eqns
                if eqn.outvars or not effect_names(eqn) & DEBUGGING
            ]
            silent = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(eqns=eqns), []))
            apply &= silent(*given, *consts)[0]
            given = [waiting_for(apply, x) for x in given]
        return masked_early(jaxpr, apply, [*given, *consts], old)

    # Mutable arrays, and callbacks that must happen, happen once.
    effects = {name for name in names - {COLLECTIVE, *DEBUGGING} if "Effect" in name}
    if effects or any(name.startswith("custom_vjp_call") for name in names):
        # These have no forward mode, which derivatives of another function need.
        return functools.partial(late, nonzeros, False)
    differentiable = functools.partial(late, nonzeros, is_checked)
    unsafe = _UNSAFE | {"scan"} if is_checked else _UNSAFE  # which costs too much twice
    if not (_calls_host(names) or names & unsafe):
        return with_derivatives_of(differentiable, early)
    # Code on the host may divide by what it is given. A line search ends on zeros.
    stand_in = nonzeros if _calls_host(names) else zeros
    quick = functools.partial(late, stand_in, False)
    return with_derivatives_of(differentiable, quick)


def _calls_host(names: set[str]) -> bool:
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


def _zeros_like(x: Any) -> Any:
    """Return zeros that change no bit of any number that they are added to."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        # Adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # float0 and PRNG keys have no zero, and nothing is added to them.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x
