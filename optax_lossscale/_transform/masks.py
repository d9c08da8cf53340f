"""The one place that decides how a masked update is laid out for XLA.

The plain layout masks what the inner transformation returns: ``jnp.where`` on the
updates and on the new state. Under XLA that is slow. A new moment is then used twice,
unmasked in the update and masked in the state, so XLA computes it twice; the update
still wants the old moment when its buffer is due to be overwritten, so a donated state
is copied.

Here, while a program is staged, the update is evaluated equation by equation, and a
leaf of the new state is masked where it is defined, before anything else uses it. The
results are the same: in a step that is applied the masked value is the new one, and in
a step that is skipped whatever was computed from it is masked in turn. The flow of data
is that of the unwrapped optimizer: each moment is computed once and written in place.
"""

import collections
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal, Var

from .._jax_internals import bind, is_staging
from .._tree import dtype_of, is_inexact, select


def masked_update(
    inner_update: Callable[[optax.Updates], tuple[optax.Updates, optax.OptState]],
    grads_finite: jax.Array,
    updates: optax.Updates,
    inner_state: optax.OptState,
) -> tuple[optax.Updates, optax.OptState]:
    """Update where the gradients are finite; elsewhere return zeros and the old state.

    The inner transformation always runs, so that a collective inside it is reached by
    every device. On a step to be skipped it sees zeros: a line search must not iterate
    on NaN, and a NaN behind ``jnp.where`` still reaches derivatives of the step.
    """
    updates = jax.tree.map(
        lambda g: jnp.where(grads_finite, g, jnp.zeros_like(g)) if is_inexact(g) else g,
        updates,
    )
    result = None
    if isinstance(grads_finite, jax.core.Tracer) and is_staging():
        result = _mask_where_defined(
            lambda: inner_update(updates), grads_finite, inner_state
        )
    if result is None:
        new_updates, new_state = inner_update(updates)
        result = new_updates, select(grads_finite, new_state, inner_state)
    new_updates, new_state = result
    # Zeros like the output: the inner transformation may return another tree.
    zeros = jax.tree.map(_zeros_like, new_updates)
    return select(grads_finite, new_updates, zeros), new_state


def _zeros_like(x: Any) -> Any:
    """Return zeros that leave every number they are added to as it is, to the bit."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        if float(np.zeros((), dtype).real) != 0:
            raise ValueError(
                "`inner` must return updates of a type that has a zero, to skip steps "
                f"with, got {dtype}. Cast its updates to float32."
            )
        # A parameter of -0.0 stays: -0.0 + 0.0 is 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # Neither float0 nor PRNG keys have a zero; nothing is added to them either.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x


def _mask_where_defined(
    inner_update: Callable[[], tuple[optax.Updates, optax.OptState]],
    grads_finite: jax.Array,
    inner_state: optax.OptState,
) -> tuple[optax.Updates, optax.OptState] | None:
    """Return the inner updates, computed from the masked state, and that state.

    None where the update cannot be evaluated from its jaxpr.
    """
    closed_jaxpr, shapes = jax.make_jaxpr(inner_update, return_shape=True)()
    old_leaves = jax.tree.leaves(inner_state)

    def evaluate() -> list[Any]:
        return _evaluate(closed_jaxpr, grads_finite, old_leaves)

    try:
        if closed_jaxpr.effects:
            # Try it where nothing is staged: an effect must not happen here and,
            # should the rest fail, in the plain layout again.
            jax.eval_shape(evaluate)
        leaves = evaluate()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(
            "This step is correct, but slower than it could be: the update of the "
            "wrapped optimizer could not be evaluated equation by equation "
            f"({type(error).__name__}: {reason}). Please report it, and name the "
            "optimizer and the version of jax.",
            stacklevel=4,  # where the update is called
        )
        return None
    new_updates, new_state = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return new_updates, new_state


def _evaluate(
    closed_jaxpr: ClosedJaxpr, grads_finite: jax.Array, old_leaves: Sequence[Any]
) -> list[Any]:
    """Evaluate the inner update, and mask the leaves of the new state, its last."""
    jaxpr = closed_jaxpr.jaxpr
    first = len(jaxpr.outvars) - len(old_leaves)
    state_vars = jaxpr.outvars[first:]
    defined = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    old_of = _maskable(defined, state_vars, old_leaves)
    env = dict(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = bind(eqn, map(read, eqn.invars))
        for var, value in zip(eqn.outvars, values, strict=True):
            if var in old_of:
                value = jnp.where(grads_finite, value, old_of[var])
            env[var] = value
    leaves = [read(atom) for atom in jaxpr.outvars]
    for i, (atom, old) in enumerate(zip(state_vars, old_leaves, strict=True), first):
        if isinstance(atom, Literal) or atom not in old_of:
            leaves[i] = jnp.where(grads_finite, leaves[i], old)
    return leaves


def _maskable(
    defined: set[Var], state_vars: Sequence[Var | Literal], old_leaves: Sequence[Any]
) -> dict[Var, Any]:
    """Map the variables that are masked where they are defined to the old values.

    The others are masked at the end: inputs passed through and constants, which no
    equation defines; a variable that is two leaves of the state, with two old values;
    one whose type the mask would change.
    """
    pairs = [
        (var, old)
        for var, old in zip(state_vars, old_leaves, strict=True)
        if not isinstance(var, Literal)
    ]
    uses = collections.Counter(var for var, _ in pairs)
    return {
        var: old
        for var, old in pairs
        if var in defined and uses[var] == 1 and var.aval == jax.typeof(old)
    }
