"""Evaluate a program, and mask its outputs where they are defined."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from .._tree import choose

Leaves = Sequence[Any]


def masked_early(jaxpr: Jaxpr, apply: jax.Array, inputs: Leaves, old: Leaves) -> Leaves:
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
        given = [var for var in eqn.invars if not isinstance(var, Literal)]
        one = jaxpr.replace(
            invars=given, eqns=[eqn], outvars=eqn.outvars, effects=eqn.effects
        )
        values = jaxpr_as_fun(ClosedJaxpr(one, []))(*map(env.get, given))
        for var, new in zip(eqn.outvars, values, strict=True):
            x = early.get(id(var))
            # Both have one type, and `jnp.where` takes longer to trace.
            env[var] = new if x is None else jax.lax.select_n(apply, x, new)
    new_state = [
        read(var) if id(var) in early else choose(apply, read(var), x)
        for var, x in outputs
    ]
    return [apply, *map(read, jaxpr.outvars[1:first]), *new_state]
