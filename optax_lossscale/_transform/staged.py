"""Lay out the update for XLA while a program is staged.

In the plain layout a new moment is used twice, unmasked in the update and masked in the
state, so XLA computes it twice. The update still needs the old moment when its buffer
should be overwritten, so a donated state is copied. And sanitized gradients must wait
for the check, so their norm cannot be computed in the same pass.

Here the update is evaluated equation by equation, on gradients that are not sanitized.
A leaf of the new state is masked where it is defined, before anything else uses it. The
results are the same. If the step is applied, the masked value is the new one. If it is
skipped, everything that was computed from it is masked in turn. Data flows as in the
unwrapped optimizer: each moment is computed once and written in place.

This holds for values. If derivatives are taken, the plain layout is evaluated instead:
a NaN behind a mask would reach them, and so would a square root of a moment that is
still 0.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Var

from .._jax_internals import as_varying, without_constants
from .evaluation import Leaves, maskable, masked
from .sanitized import Given, sanitized, split
from .steering import may_have_custom_derivatives, steering


def staged_update(
    inner_update: Callable[..., Any],
    apply: jax.Array,
    updates: optax.Updates,
    inner_state: optax.OptState,
    extra_args: dict[str, Any],
) -> tuple[jax.Array, optax.Updates, optax.OptState] | None:
    """Return whether to apply the step, the inner updates, and the masked new state.

    Return None if the update cannot be evaluated from its jaxpr.
    """
    given, put_back = split(updates, extra_args)
    # In the types that sanitized inputs have.
    given = jax.tree.map(lambda x: as_varying(x, apply), given)
    closed_jaxpr, shapes = jax.make_jaxpr(
        lambda given: inner_update(*put_back(given)), return_shape=True
    )(given)
    old_leaves, is_checked = jax.tree.leaves(inner_state), shapes[0] is not None
    try:
        leaves = _evaluated(closed_jaxpr, apply, given, old_leaves, is_checked)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(
            "This step is correct, but slower than it could be: the update of the "
            "wrapped optimizer could not be evaluated equation by equation "
            f"({type(error).__name__}: {reason}). Please report this, and name the "
            "optimizer and the version of jax.",
            stacklevel=4,  # the caller of `update`
        )
        return None
    usable, new_updates, new_state = jax.tree.unflatten(
        jax.tree.structure(shapes), leaves
    )
    return usable if is_checked else apply, new_updates, new_state


def _evaluated(
    closed_jaxpr: ClosedJaxpr,
    apply: jax.Array,
    given: Given,
    old_leaves: Leaves,
    is_checked: bool,
) -> Leaves:
    """Return the leaves of the inner updates and the masked ones of the new state.

    If ``is_checked``, a flag comes first: whether the step is applied.
    """
    jaxpr, consts = without_constants(closed_jaxpr), closed_jaxpr.consts
    args = apply, given, consts, old_leaves
    variables = jaxpr.invars[len(consts) :]  # the leaves of ``given``

    steers = steering(jaxpr)
    if not (has_rule := may_have_custom_derivatives(jaxpr)):
        # This evaluation itself is then differentiated, so it must see no NaN.
        steers = steers.union(variables)

    def fast(apply: jax.Array, given: Given, consts: Leaves, old: Leaves) -> Leaves:
        given = _sanitized_where(steers, variables, apply, given)
        early = maskable(jaxpr, steers, old)
        return masked(jaxpr, steers, apply, given, consts, old, early, is_checked)

    def plain(apply: jax.Array, given: Given, consts: Leaves, old: Leaves) -> Leaves:
        def masked_last(apply: jax.Array, is_checked: bool) -> Leaves:
            sane = sanitized(apply, given, differentiated=True)
            return masked(jaxpr, steers, apply, sane, consts, old, {}, is_checked)

        if is_checked:
            apply = masked_last(apply, True)[0]
            return [apply, *masked_last(apply, False)[1:]]
        return masked_last(apply, False)

    function = _with_derivatives_of(plain, fast) if has_rule else fast
    if closed_jaxpr.effects:
        # Try it first without staging: an effect must not be staged here and, if the
        # rest fails, again in the plain layout.
        jax.eval_shape(lambda: function(*args))
    return function(*args)


def _with_derivatives_of(
    derived: Callable[..., Leaves], function: Callable[..., Leaves]
) -> Callable[..., Leaves]:
    """Return a function with the derivatives of another that has the same values.

    Neither may close over tracers.
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

            moving, directions = (
                list(itertools.compress(x, moves)) for x in (primals, tangents)
            )
            return jax.jvp(along, (moving,), (directions,))

        return evaluate(*leaves)

    return both


def _sanitized_where(
    steers: set[Var], variables: Sequence[Var], apply: jax.Array, given: Given
) -> Given:
    """Sanitize the inputs that a loop, a branch or an effect depends on."""
    if steers.isdisjoint(variables):
        return given
    leaves, structure = jax.tree.flatten(given)
    sane = jax.tree.leaves(sanitized(apply, given, differentiated=False))
    rows = zip(variables, leaves, sane, strict=True)
    chosen = [s if var in steers else x for var, x, s in rows]
    return jax.tree.unflatten(structure, chosen)
