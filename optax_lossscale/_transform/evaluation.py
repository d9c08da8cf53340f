"""Evaluate the jaxpr of an update, and mask the new state where it is defined."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from .._jax_internals import bind, bind_while
from .sanitized import Given, sanitized
from .steering import may_be_left_out, may_be_repeated

Leaves = list[Any]
Environment = dict[Var, Any]


def masked(
    jaxpr: Jaxpr,
    steers: set[Var],
    apply: jax.Array,
    given: Given,
    consts: Leaves,
    old_leaves: Leaves,
    early: dict[Var, Any],
    is_checked: bool,
) -> Leaves:
    """Evaluate a jaxpr, and mask the leaves of the new state, which come last.

    Leaves in ``early``, which maps them to their old values, are masked where they are
    defined, and the others at the end.

    If ``is_checked``, the first output is a flag that is combined with ``apply``. The
    masked leaves are then computed again, from inputs sanitized with that flag. If they
    were not, XLA would keep the whole new state in memory while it waits for the flag.
    """
    flag: list[Any] = []
    known: Environment = {}
    if is_checked:
        known = _evaluate(jaxpr, steers, apply, given, consts, {}, {})
        apply &= _read(known, jaxpr.outvars[0])
        given = sanitized(apply, given, differentiated=False)
        flag = [apply]
    env = _evaluate(jaxpr, steers, apply, given, consts, early, known)
    leaves = [_read(env, atom) for atom in jaxpr.outvars]
    first = len(leaves) - len(old_leaves)
    for i, old in enumerate(old_leaves, first):
        atom = jaxpr.outvars[i]
        if isinstance(atom, Literal) or atom not in early:
            leaves[i] = jnp.where(apply, leaves[i], old)
    return flag + leaves[len(flag) :]


def _evaluate(
    jaxpr: Jaxpr,
    steers: set[Var],
    apply: jax.Array,
    given: Given,
    consts: Leaves,
    early: dict[Var, Any],
    known: Environment,
) -> Environment:
    """Evaluate the equations of a jaxpr, and mask the variables in ``early``.

    A skipped step does not enter a loop, unless the loop ``steers`` what follows.
    ``known`` holds the values of an earlier evaluation, which are right for an applied
    step. If there are any, only cheap equations are evaluated again.
    """
    inputs = [*consts, *jax.tree.leaves(given)]
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        args = [_read(env, atom) for atom in eqn.invars]
        values: Sequence[Any]
        if known and not may_be_repeated(eqn):
            values = [known[var] for var in eqn.outvars]
        elif may_be_left_out(eqn) and steers.isdisjoint(eqn.outvars):
            values = bind_while(eqn, args, apply)
        else:
            values = bind(eqn, args)
        for var, value in zip(eqn.outvars, values, strict=True):
            if var in early:
                # Both have one type, and `jnp.where` takes longer to trace.
                value = jax.lax.select_n(apply, early[var], value)
            env[var] = value
    return env


def _read(env: Environment, atom: Var | Literal) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def maskable(
    jaxpr: Jaxpr, steers: set[Var], old_leaves: Sequence[Any]
) -> dict[Var, Any]:
    """Map the variables that are masked where they are defined to their old values.

    The others are masked at the end:

    - inputs that are passed through, and constants: no equation defines them;
    - a variable that is two leaves of the state: it has two old values;
    - a variable whose type the mask would change;
    - a variable that a loop, a branch or an effect depends on;
    - scalars: this costs nothing, and a step may divide by a count whose old value is
      still 0.
    """
    defined = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    atoms = jaxpr.outvars[len(jaxpr.outvars) - len(old_leaves) :]
    uses = collections.Counter(x for x in atoms if not isinstance(x, Literal))
    return {
        var: old
        for var, old in zip(atoms, old_leaves, strict=True)
        if not isinstance(var, Literal)
        and var in defined
        and uses[var] == 1
        and var not in steers
        and jnp.ndim(old) > 0
        and var.aval == jax.typeof(old)
    }
