"""The update laid out for XLA, while a program is staged.

In the plain layout a new moment is used twice, unmasked in the update and masked in the
state, so XLA computes it twice; the update still wants the old moment when its buffer
is due to be overwritten, so a donated state is copied. And sanitized gradients have to
wait for the check, so that a norm of them cannot be taken in the same pass.

Here the update is evaluated equation by equation, on the gradients as they are, and a
leaf of the new state is masked where it is defined, before anything else uses it. The
results are the same: in a step that is applied the masked value is the new one, and in
a step that is skipped whatever was computed from it is masked in turn. The flow of data
is that of the unwrapped optimizer: each moment is computed once and written in place.

That holds for values. Where derivatives are taken, the plain layout is evaluated: a NaN
behind a mask reaches them, and so does a square root of a moment that is still 0.
"""

import collections
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from .._jax_internals import as_varying, bind, bind_while
from .sanitized import Given, sanitized, split
from .steering import may_be_left_out, may_have_custom_derivatives, steering

Leaves = list[Any]


def staged_update(
    inner_update: Callable[..., tuple[optax.Updates, optax.OptState]],
    apply: jax.Array,
    updates: optax.Updates,
    inner_state: optax.OptState,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState] | None:
    """Return the inner updates, of use where ``apply``, and the masked new state.

    None where the update cannot be evaluated from its jaxpr.
    """
    given, put_back = split(updates, extra_args)
    # Of the types that sanitized ones have.
    given = jax.tree.map(lambda x: as_varying(x, apply), given)
    closed_jaxpr, shapes = jax.make_jaxpr(
        lambda given: inner_update(*put_back(given)), return_shape=True
    )(given)
    old_leaves = jax.tree.leaves(inner_state)
    try:
        leaves = _evaluated(closed_jaxpr, apply, given, old_leaves)
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


def _evaluated(
    closed_jaxpr: ClosedJaxpr, apply: jax.Array, given: Given, old_leaves: Leaves
) -> Leaves:
    """Return the leaves of the inner updates, and the masked ones of the new state."""
    jaxpr, args = closed_jaxpr.jaxpr, (apply, given, closed_jaxpr.consts, old_leaves)

    steers = steering(jaxpr)
    if not (has_rule := may_have_custom_derivatives(jaxpr)):
        # Derivatives are then those of the values, so that no NaN may be among them.
        steers = steers.union(jaxpr.invars)

    def fast(apply: jax.Array, given: Given, consts: Leaves, old: Leaves) -> Leaves:
        given = _sanitized_where(steers, jaxpr.invars, apply, given)
        early = _maskable(jaxpr, steers, old)
        return _evaluate(jaxpr, steers, apply, given, consts, old, early)

    def plain(apply: jax.Array, given: Given, consts: Leaves, old: Leaves) -> Leaves:
        given = sanitized(apply, given, differentiated=True)
        return _evaluate(jaxpr, steers, apply, given, consts, old, {})

    function = _with_derivatives_of(plain, fast) if has_rule else fast
    if closed_jaxpr.effects:
        # Try it where nothing is staged: an effect must not happen here and, should
        # the rest fail, in the plain layout again.
        jax.eval_shape(lambda: function(*args))
    return function(*args)


def _with_derivatives_of(
    derived: Callable[..., Leaves], function: Callable[..., Leaves]
) -> Callable[..., Leaves]:
    """Return a function with the derivatives of another, which has the same values.

    Neither may close over what is traced.
    """

    def both(*args: Any) -> Leaves:
        leaves, structure = jax.tree.flatten(args)

        @jax.custom_jvp
        def evaluate(*leaves: Any) -> Leaves:
            return function(*jax.tree.unflatten(structure, leaves))

        @functools.partial(evaluate.defjvp, symbolic_zeros=True)
        def _(primals: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
            moves = [not isinstance(t, SymbolicZero) for t in tangents]

            def along(moving: Leaves) -> Leaves:
                rest = iter(moving)
                leaves = [
                    next(rest) if moved else x
                    for x, moved in zip(primals, moves, strict=True)
                ]
                return derived(*jax.tree.unflatten(structure, leaves))

            return jax.jvp(
                along,
                ([x for x, moved in zip(primals, moves, strict=True) if moved],),
                ([t for t, moved in zip(tangents, moves, strict=True) if moved],),
            )

        return evaluate(*leaves)

    return both


def _sanitized_where(
    steers: set[Var], variables: Sequence[Var], apply: jax.Array, given: Given
) -> Given:
    """Sanitize what a loop, a branch or an effect depends on."""
    if steers.isdisjoint(variables):
        return given
    leaves, structure = jax.tree.flatten(given)
    sane = jax.tree.leaves(sanitized(apply, given, differentiated=False))
    rows = zip(variables, leaves, sane, strict=True)
    chosen = [s if var in steers else x for var, x, s in rows]
    return jax.tree.unflatten(structure, chosen)


def _evaluate(
    jaxpr: Jaxpr,
    steers: set[Var],
    apply: jax.Array,
    given: Given,
    consts: Leaves,
    old_leaves: Leaves,
    early: dict[Var, Any],
) -> Leaves:
    """Evaluate a jaxpr, and mask the leaves of the new state, its last outputs.

    Those that ``early`` maps to their old values are masked where they are defined. A
    loop is not entered in a step to be skipped, unless it ``steers`` what follows.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, jax.tree.leaves(given), strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        args = [read(atom) for atom in eqn.invars]
        if may_be_left_out(eqn) and steers.isdisjoint(eqn.outvars):
            values = bind_while(eqn, args, apply)
        else:
            values = bind(eqn, args)
        for var, value in zip(eqn.outvars, values, strict=True):
            if var in early:
                # Of one type, so that `jnp.where` would only take longer to trace.
                value = jax.lax.select_n(apply, early[var], value)
            env[var] = value
    leaves = [read(atom) for atom in jaxpr.outvars]
    first = len(leaves) - len(old_leaves)
    for i, old in enumerate(old_leaves, first):
        atom = jaxpr.outvars[i]
        if isinstance(atom, Literal) or atom not in early:
            leaves[i] = jnp.where(apply, leaves[i], old)
    return leaves


def _maskable(
    jaxpr: Jaxpr, steers: set[Var], old_leaves: Sequence[Any]
) -> dict[Var, Any]:
    """Map the variables that are masked where they are defined to the old values.

    The others are masked at the end: inputs passed through and constants, which no
    equation defines; a variable that is two leaves of the state, with two old values;
    one whose type the mask would change; one that a loop waits for, or a branch or an
    effect depends on; and single numbers, which cost nothing: a count that is still 0
    would be divided by.
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
