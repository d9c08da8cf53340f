"""Apply or skip an update: the mask that is always right.

The update runs in every step, so every device reaches a collective inside it. In a
skipped step it gets finite numbers, and its results are discarded. Otherwise a line
search would iterate on NaN, and a NaN behind ``jnp.where`` would reach derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._precision import dtype_of, is_inexact
from .._tree import choose, select

Arrays = Sequence[jax.Array]
# Given whether the step is applied, and an array, returns one that is finite if not.
Sanitize = Callable[[jax.Array, jax.Array], jax.Array]


def masked(
    update: Callable[[Arrays], Any],
    apply: jax.Array,
    arrays: Arrays,
    sanitizers: Sequence[Sanitize],
    old_state: Any,
    *,
    again: bool = False,
) -> Any:
    """Return whether an update is applied, its updates, and the new or the old state.

    ``update`` takes the arrays that may hold NaN, and returns whether its results may
    be used, the updates and the new state. If it runs ``again``, then what made its
    results unusable is no NaN behind a mask in derivatives.
    """

    def sanitized(apply: jax.Array) -> Arrays:
        pairs = zip(sanitizers, arrays, strict=True)
        return [sanitize(apply, x) for sanitize, x in pairs]

    usable, updates, new_state = update(sanitized(apply))
    apply &= usable
    if again:
        _, updates, new_state = update(sanitized(apply))
    return apply, updates, select(apply, new_state, old_state)


def split(
    grads: optax.Updates, extra_args: dict[str, Any], staging: bool
) -> tuple[
    Arrays, Sequence[Sanitize], Callable[[Arrays], tuple[optax.Updates, dict[str, Any]]]
]:
    """Return the arrays that may hold NaN, and how to sanitize each.

    The third result returns the gradients and extra arguments with other arrays.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path((grads, extra_args))
    leaves = [x for _, x in paths]
    known = set(map(id, jax.tree.leaves(grads)))
    # While staging, a concrete array is a constant, or Python code may read it.
    open_type = jax.core.Tracer if staging else jax.Array
    chosen: dict[int, Sanitize] = {}
    for i, (path, x) in enumerate(paths):
        if not is_inexact(x):
            continue
        if path[0].idx == 0 or id(x) in known:
            # A line search takes the gradients twice: sanitize them alike.
            chosen[i] = _gradient
        elif isinstance(x, open_type) and not hasattr(jax.typeof(x), "inner_aval"):
            chosen[i] = _loss if path[1].key == "value" else _other

    def rebuild(arrays: Arrays) -> tuple[optax.Updates, dict[str, Any]]:
        new = dict(zip(chosen, arrays, strict=True))
        merged = [new.get(i, x) for i, x in enumerate(leaves)]
        updates, extra_args = jax.tree.unflatten(structure, merged)
        return updates, extra_args

    return [leaves[i] for i in chosen], list(chosen.values()), rebuild


def _gradient(apply: jax.Array, x: jax.Array) -> jax.Array:
    return choose(apply, x, _placeholder(x))


def _loss(apply: jax.Array, x: jax.Array) -> jax.Array:
    # A loss so large that any other is better, so that a line search ends.
    return choose(apply, x, jnp.full_like(x, float(jnp.finfo(x.dtype).max) / 4))


def _other(apply: jax.Array, x: jax.Array) -> jax.Array:
    return choose(apply | jnp.isfinite(x), x, _placeholder(x))


def _placeholder(x: jax.Array) -> jax.Array:
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
