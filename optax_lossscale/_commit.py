"""The one place that decides how a masked update is laid out for XLA.

The plain layout masks what the inner transformation returns: ``jnp.where`` on the
updates and on the new state. Under XLA that is slow. A new moment is then used twice,
unmasked in the update and masked in the state, so XLA computes it twice; the update
still wants the old moment when its buffer is due to be overwritten, so a donated state
is copied.

Here, while tracing, the update is evaluated equation by equation, and a leaf of the
new state is masked where it is defined, before anything else uses it. The results are
the same: in a step that is applied the masked value is the new one, and in a step that
is skipped whatever was computed from it is masked in turn. The flow of data is that of
the unwrapped optimizer: each moment is computed once and written in place.
"""

import collections
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ._tree import dtype_of, is_inexact, select

_logger = logging.getLogger(__name__)


def commit(
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

    if isinstance(grads_finite, jax.core.Tracer):
        try:
            new_updates, new_state = _mask_where_defined(
                functools.partial(inner_update, updates), grads_finite, inner_state
            )
        except Exception:
            # If the inner transformation is at fault, it will say so again.
            _logger.debug("the masks are in the plain, slower layout", exc_info=True)
        else:
            return _or_zeros(grads_finite, new_updates), new_state
    new_updates, new_state = inner_update(updates)
    return (
        _or_zeros(grads_finite, new_updates),
        select(grads_finite, new_state, inner_state),
    )


def _or_zeros(grads_finite: jax.Array, updates: optax.Updates) -> optax.Updates:
    # Zeros like the output: the inner transformation may return another tree.
    return select(grads_finite, updates, jax.tree.map(_zeros_like, updates))


def _zeros_like(x: Any) -> Any:
    # Neither float0 nor PRNG keys have a zero; nothing is added to them either.
    return jnp.zeros_like(x) if jnp.issubdtype(dtype_of(x), np.number) else x


def _mask_where_defined(
    inner_update: Callable[[], tuple[optax.Updates, optax.OptState]],
    grads_finite: jax.Array,
    inner_state: optax.OptState,
) -> tuple[optax.Updates, optax.OptState]:
    """Return the inner updates, computed from the masked state, and that state."""
    closed_jaxpr, shapes = jax.make_jaxpr(inner_update, return_shape=True)()
    jaxpr = closed_jaxpr.jaxpr
    old_leaves = jax.tree.leaves(inner_state)
    first = len(jaxpr.outvars) - len(old_leaves)
    state_vars = jaxpr.outvars[first:]
    old_of = _maskable(jaxpr, state_vars, old_leaves)

    def evaluate() -> list[Any]:
        env = dict(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))

        def read(atom: Var | Literal) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            values = _bind(eqn, map(read, eqn.invars))
            for var, value in zip(eqn.outvars, values, strict=True):
                if id(var) in old_of:
                    value = jnp.where(grads_finite, value, old_of[id(var)])
                env[var] = value
        return [read(atom) for atom in jaxpr.outvars]

    if closed_jaxpr.effects:
        # Try it where nothing is staged: an effect must not happen here and, should
        # the rest fail, in the plain layout again.
        jax.eval_shape(evaluate)
    leaves = evaluate()
    for i, (var, old) in enumerate(zip(state_vars, old_leaves, strict=True), first):
        if id(var) not in old_of:
            leaves[i] = jnp.where(grads_finite, leaves[i], old)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _maskable(
    jaxpr: Jaxpr, state_vars: Sequence[Var | Literal], old_leaves: Sequence[Any]
) -> dict[int, Any]:
    """Map the ids of the variables to mask where they are defined to the old values.

    The others are masked at the end: inputs passed through and constants, which no
    equation defines; a variable that is two leaves of the state, with two old values;
    one whose type the mask would change.
    """
    defined = {id(var) for eqn in jaxpr.eqns for var in eqn.outvars}
    uses = collections.Counter(map(id, state_vars))
    return {
        id(var): old
        for var, old in zip(state_vars, old_leaves, strict=True)
        if id(var) in defined and uses[id(var)] == 1 and var.aval == jax.typeof(old)
    }


def _bind(eqn: JaxprEqn, args: Iterable[Any]) -> Sequence[Any]:
    """Evaluate one equation, as documented for interpreters of jaxprs."""
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    # jax 0.7 keeps the functions among the parameters apart.
    functions, bind_params = (
        bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    )
    source = eqn.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    with (
        source_info_util.user_context(source.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        out = eqn.primitive.bind(*functions, *args, **bind_params)
    return out if eqn.primitive.multiple_results else [out]
