"""Replace gradients and extra arguments by finite numbers in a skipped step.

The results of a skipped step are discarded, so any number will do. But a line search
must not iterate on NaN, and a NaN behind ``jnp.where`` still reaches derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax_internals import is_staging
from .._precision import dtype_of, is_inexact
from .._tree import choose

Leaves = Sequence[Any]
StandIn = Callable[[Any], jax.Array]


def split(
    updates: optax.Updates, extra_args: dict[str, Any]
) -> tuple[
    Leaves,
    Callable[[jax.Array, Leaves, StandIn], Leaves],
    Callable[[Leaves], tuple[Any, Any]],
]:
    """Return the leaves that may be non-finite, and two functions of such leaves.

    The first one puts finite numbers in their place unless the step is applied. The
    second one returns gradients and extra arguments that have them.
    """
    leaves, structure = jax.tree.flatten((updates, extra_args))
    grads = {id(x) for x in jax.tree.leaves(updates)}
    kinds = [_gradient] * len(jax.tree.leaves(updates))
    for name in sorted(extra_args):
        kind = _loss if name == "value" else _other
        for x in jax.tree.leaves(extra_args[name]):
            # A line search takes the gradients twice: sanitize them once.
            kinds.append(_gradient if id(x) in grads else kind)
    is_open = _is_traced if is_staging() else _is_array
    chosen = {
        i: kind
        for i, (x, kind) in enumerate(zip(leaves, kinds, strict=True))
        if is_inexact(x) and (kind is _gradient or is_open(x))
    }

    def sanitize(apply: jax.Array, given: Leaves, stand_in: StandIn) -> Leaves:
        pairs = zip(chosen.values(), given, strict=True)
        return [sane(apply, x, stand_in) for sane, x in pairs]

    def put_back(given: Leaves) -> tuple[Any, Any]:
        new = dict(zip(chosen, given, strict=True))
        merged = [new.get(i, x) for i, x in enumerate(leaves)]
        updates, extra_args = jax.tree.unflatten(structure, merged)
        return updates, extra_args

    return [leaves[i] for i in chosen], sanitize, put_back


def _is_traced(x: Any) -> bool:
    # While staging, a concrete array is a constant, or Python code may read it.
    return isinstance(x, jax.core.Tracer) and _is_array(x)


def _is_array(x: Any) -> bool:
    is_mutable = isinstance(x, jax.Array) and hasattr(jax.typeof(x), "inner_aval")
    return isinstance(x, jax.Array) and not is_mutable


def _gradient(apply: jax.Array, x: Any, stand_in: StandIn) -> jax.Array:
    return choose(apply, x, stand_in(x))


def _loss(apply: jax.Array, x: Any, stand_in: StandIn) -> jax.Array:
    # A loss so large that any other is better, so that a line search ends.
    return choose(apply, x, jnp.full_like(x, float(jnp.finfo(x.dtype).max) / 4))


def _other(apply: jax.Array, x: Any, stand_in: StandIn) -> jax.Array:
    return choose(apply | jnp.isfinite(x), x, stand_in(x))


def zeros(x: Any) -> jax.Array:
    """Return gradients on which a line search ends at its first trial."""
    return jnp.zeros_like(x)


def nonzeros(x: Any) -> jax.Array:
    """Return nonzero numbers whose deviations from their mean are nonzero, too.

    The derivatives of a norm and of a square root are not finite at 0. The squares of
    these numbers, and a thousandth of the squares, are nonzero in float16 as well.
    """
    shape = jnp.shape(x)
    index = sum(
        jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
    )
    # 1, 2 and 5 times 1/64. Adding them to zeros makes them sharded as ``x`` is.
    steps = 1 + (index % 3) ** 2
    return jnp.zeros_like(x) + (jnp.asarray(steps) / 64).astype(dtype_of(x))
