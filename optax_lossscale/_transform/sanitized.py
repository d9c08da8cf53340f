"""Replace gradients and extra arguments by finite numbers in a skipped step.

The results of a skipped step are discarded, so any number will do. But a line search
must not iterate on NaN, and a NaN behind ``jnp.where`` still reaches derivatives.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_internals import is_staging
from .._tree import dtype_of, is_inexact


class Given(NamedTuple):
    """The leaves of the inner transformation's inputs that may be non-finite."""

    grads: list[Any]
    value: list[Any]  # the loss, if it is among the extra arguments
    others: list[Any]


def split(
    updates: optax.Updates, extra_args: dict[str, Any]
) -> tuple[Given, Callable[[Given], tuple[optax.Updates, dict[str, Any]]]]:
    """Return the leaves that may be non-finite, and a function that puts them back."""
    value = {name: extra_args[name] for name in extra_args if name == "value"}
    others = {name: x for name, x in extra_args.items() if name != "value"}
    flat = [jax.tree.flatten(tree) for tree in (updates, value, others)]
    is_open = _is_traced if is_staging() else _is_array
    chosen = [
        [test(x) for x in leaves]
        for test, (leaves, _) in zip((is_inexact, is_open, is_open), flat, strict=True)
    ]

    def put_back(given: Given) -> tuple[optax.Updates, dict[str, Any]]:
        trees = []
        for (leaves, structure), is_new, new in zip(flat, chosen, given, strict=True):
            rest = iter(new)
            merged = [
                next(rest) if is_new_leaf else x
                for x, is_new_leaf in zip(leaves, is_new, strict=True)
            ]
            trees.append(jax.tree.unflatten(structure, merged))
        grads, value, others = trees
        return grads, {**value, **others}

    parts = (
        list(itertools.compress(leaves, is_new))
        for (leaves, _), is_new in zip(flat, chosen, strict=True)
    )
    return Given(*parts), put_back


def _is_traced(x: Any) -> bool:
    # While staging, a concrete array is a constant, or Python code may read it.
    return isinstance(x, jax.core.Tracer) and _is_array(x)


def _is_array(x: Any) -> bool:
    is_mutable = isinstance(x, jax.Array) and hasattr(jax.typeof(x), "inner_aval")
    return isinstance(x, jax.Array) and not is_mutable and is_inexact(x)


def sanitized(apply: jax.Array, given: Given, differentiated: bool) -> Given:
    """Return the inputs unchanged if the step is applied, and finite ones if not.

    Zeros end a line search at once. If derivatives are taken, other numbers are used,
    because the derivatives of a norm and of a square root are not finite at 0.
    """
    stand_in = _pattern if differentiated else jnp.zeros_like

    def extra(x: Any) -> Any:
        return jnp.where(apply | jnp.isfinite(x), x, stand_in(x))

    return Given(
        jax.tree.map(lambda g: jnp.where(apply, g, stand_in(g)), given.grads),
        jax.tree.map(lambda x: jnp.where(apply, x, _large(x)), given.value),
        jax.tree.map(extra, given.others),
    )


def _pattern(x: Any) -> jax.Array:
    """Return nonzero numbers whose deviations from their mean are nonzero, too.

    Their squares, and a thousandth of these, are nonzero in float16 as well.
    """
    shape = jnp.shape(x)
    index = sum(
        jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
    )
    # 1, 2 and 5 times 1/64. Adding them to zeros makes them sharded as ``x`` is.
    steps = 1 + (index % 3) ** 2
    return jnp.zeros_like(x) + (jnp.asarray(steps) / 64).astype(dtype_of(x))


def _large(x: Any) -> jax.Array:
    """Return a loss so large that any other is better, so that a line search ends."""
    return jnp.full_like(x, float(jnp.finfo(dtype_of(x)).max) / 4)
