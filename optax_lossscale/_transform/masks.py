"""Apply or skip the inner update.

The plain layout sanitizes the inputs of the inner transformation and masks its outputs,
with ``jnp.where`` on the updates and on the new state. XLA compiles that to slow code.
So while a program is staged, ``staged.py`` evaluates the update from its jaxpr instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._jax_internals import is_differentiated, is_staging
from .._tree import dtype_of, select
from .sanitized import sanitized, split
from .staged import staged_update


def masked_update(
    inner_update: Callable[..., Any],
    apply: jax.Array,
    updates: optax.Updates,
    inner_state: optax.OptState,
    extra_args: dict[str, Any],
) -> tuple[jax.Array, optax.Updates, optax.OptState]:
    """Return the update of an applied step, or zeros and the old state if skipped.

    The inner transformation always runs, so every device reaches a collective inside
    it. ``inner_update`` takes the gradients and the extra arguments. It returns three
    things: whether its results may be used (None if that is not checked), the updates,
    and the new state.

    The first result of this function is whether the step is applied.
    """
    result = None
    if isinstance(apply, jax.core.Tracer) and is_staging():
        result = staged_update(inner_update, apply, updates, inner_state, extra_args)
    if result is None:
        given, put_back = split(updates, extra_args)
        differentiated = is_differentiated()

        def update(apply: jax.Array) -> Any:
            return inner_update(*put_back(sanitized(apply, given, differentiated)))

        usable, new_updates, new_state = update(apply)
        if usable is not None:
            apply &= usable
            if differentiated:
                # A NaN behind a mask would reach the derivatives.
                _, new_updates, new_state = update(apply)
        result = apply, new_updates, select(apply, new_state, inner_state)
    apply, new_updates, new_state = result
    # Shaped like the output: the inner transformation may return another tree.
    zeros = jax.tree.map(_zeros_like, new_updates)
    return apply, select(apply, new_updates, zeros), new_state


def _zeros_like(x: Any) -> Any:
    """Return zeros that change no bit of any number that they are added to."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        if float(np.zeros((), dtype).real) != 0:
            raise ValueError(
                "`inner` must return updates of a type that has a zero, since skipped "
                f"steps return zeros, got {dtype}. Cast its updates to float32."
            )
        # Adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # float0 and PRNG keys have no zero, and nothing is added to them.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x
