"""Checks and repairs of the states that rules take and return.

A loaded state may hold anything. So may a rule whose numbers
``optax.inject_hyperparams`` traces: they are not checked, and may be NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._finite import all_finite
from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._state import LossScaleState, check_single
from .._tree import same_structure, select
from .._validation import describe

_DTYPES = tuple(map(jnp.dtype, ("float32", "int32", "int32", "bool", "int32", "int32")))
_LARGEST_COUNT = 2.0**31 - 2**7  # in float32; the largest int32 would round up


def is_traced(rule: Any) -> bool:
    """Return whether a number of a rule is being traced."""
    return any(isinstance(x, jax.core.Tracer) for x in vars(rule).values())


def normal(scale: Any, otherwise: Any) -> jax.Array:
    """Clip a loaded scale so that its reciprocal is normal; NaN is ``otherwise``."""
    scale = jnp.asarray(scale, jnp.float32)
    scale = jnp.where(jnp.isnan(scale), jnp.asarray(otherwise, jnp.float32), scale)
    return jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)


def first_scale(value: Any) -> Any:
    """Return the first scale of a rule; if it is traced, it was not checked before."""
    return normal(value, 1.0) if isinstance(value, jax.core.Tracer) else value


def count(value: Any) -> jax.Array:
    """Return a count as int32, 1 or more; if traced, it was not checked before."""
    if not isinstance(value, jax.core.Tracer):
        return jnp.asarray(value, jnp.int32)
    if jnp.issubdtype(value.dtype, jnp.floating):
        # Converting NaN, or a number that is too large, to an integer is undefined.
        value = jnp.asarray(value, jnp.float32)
        value = jnp.where(value >= 1, jnp.minimum(value, _LARGEST_COUNT), 1)
    return jnp.maximum(jnp.asarray(value, jnp.int32), 1)


def check_state(state: Any) -> LossScaleState:
    """Return the state of one run in its own types, or raise if it is not one."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "`state` must be a LossScaleState, as the rule's `init` returns it, got "
            f"{describe(state)}. `get_loss_scale_state` returns the one inside an "
            "optimizer state."
        )
    # Nearly every state is fine, and this check is faster than the full one.
    for x, dtype in zip(state, _DTYPES, strict=False):
        if not isinstance(x, jax.Array) or x.dtype is not dtype:
            return check_single(state)
        if x.shape != () or getattr(x, "weak_type", False):
            return check_single(state)
    return state


def own_memory(rule: Any, state: LossScaleState) -> LossScaleState:
    """Return a state whose memory has the types that the rule gives it.

    A rule without a memory leaves that of another rule alone.
    """
    own = jax.eval_shape(rule.init).memory
    if not jax.tree.leaves(own):
        return state
    shapes, own_shapes = (
        list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (state.memory, own)
    )
    if not same_structure(state.memory, own) or shapes != own_shapes:
        raise ValueError(
            f"`state` must have the memory of a {type(rule).__name__}, "
            f"{jax.tree.structure(own)} of shapes {own_shapes}, got "
            f"{describe(state.memory)}. To switch to another rule, start from its own "
            "state: `rule.init()`."
        )
    memory = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), state.memory, own)
    return state._replace(memory=memory)


def sound(rule: Any, state: LossScaleState, old: LossScaleState) -> LossScaleState:
    """Repair the next state of a rule whose numbers are traced.

    A scale that would leave the range keeps its old value. A memory that is not finite
    is initialized again.
    """
    if not rule.skip_nonfinite:
        return state
    scale = state.loss_scale
    in_range = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
    scale = jnp.where(in_range, scale, normal(old.loss_scale, 1.0))
    memory, first = state.memory, rule.init().memory
    if jax.tree.leaves(first):
        memory = select(all_finite(memory), memory, first)
    return state._replace(loss_scale=scale, memory=memory)
