"""What stands in for gradients and extra arguments in a step that is skipped.

Its results are thrown away, so any number will do. But a line search must not iterate
on NaN, and a NaN behind ``jnp.where`` still reaches derivatives of the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._tree import dtype_of, is_inexact


class Given(NamedTuple):
    """What the inner transformation is given and may not be finite; else None."""

    grads: optax.Updates
    value: dict[str, Any]  # the loss, if it is among the extra arguments
    others: dict[str, Any]


def split(
    updates: optax.Updates, extra_args: dict[str, Any]
) -> tuple[Given, Callable[[Given], tuple[optax.Updates, dict[str, Any]]]]:
    """Return what may not be finite, and a function that puts it back."""
    names = {name: name == "value" for name in extra_args}
    trees = Given(
        updates,
        {name: extra_args[name] for name in names if names[name]},
        {name: extra_args[name] for name in names if not names[name]},
    )

    def put_back(given: Given) -> tuple[optax.Updates, dict[str, Any]]:
        grads, value, others = jax.tree.map(
            lambda x, new: x if new is None else new, trees, given
        )
        return grads, {**value, **others}

    grads = jax.tree.map(lambda g: g if is_inexact(g) else None, updates)
    extras = jax.tree.map(lambda x: x if _is_open(x) else None, trees[1:])
    return Given(grads, *extras), put_back


def _is_open(x: Any) -> bool:
    """Return whether an extra argument may not be finite; numbers of the host tell."""
    if not is_inexact(x):
        return False
    return isinstance(x, jax.Array) or not np.all(np.isfinite(x))


def sanitized(apply: jax.Array, given: Given, differentiated: bool) -> Given:
    """Return what is given where a step is to be applied, elsewhere something finite.

    Zeros end a line search at once, but where a derivative is taken, those of a norm
    and of a square root at 0 are not finite.
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
    """Return numbers that are not zero, nor is what is left without their mean.

    Their squares, and a thousandth of these, are not zero in float16 either.
    """
    shape = jnp.shape(x)
    index = sum(
        jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
    )
    # In steps of 1/64, 1, 2 and 5. Added to zeros, it is sharded as these are.
    steps = 1 + (index % 3) ** 2
    return jnp.zeros_like(x) + (jnp.asarray(steps) / 64).astype(dtype_of(x))


def _large(x: Any) -> jax.Array:
    """Return a loss than which any other is better, so that a line search ends."""
    return jnp.full_like(x, float(jnp.finfo(dtype_of(x)).max) / 4)
