"""Code that the growing rules share: the counters and the next scale."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._state import LossScaleState, recorded
from .base import LossScale
from .soundness import count, normal


def float32(rule: LossScale, *names: str) -> tuple[jax.Array, ...]:
    """Return fields as float32: ``inject_hyperparams`` may trace them in any type."""
    return tuple(jnp.asarray(getattr(rule, name), jnp.float32) for name in names)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return the scale 2**floor(exponent), exactly."""
    lowest, highest = math.log2(SMALLEST_SCALE), math.log2(LARGEST_SCALE)
    return exact_power(jnp.clip(jnp.floor(exponent), lowest, highest).astype(jnp.int32))


def exact_power(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent for a whole exponent; the result must be a normal number.

    ``jnp.exp2`` and ``jnp.ldexp`` compute powers, which some devices round poorly.
    """
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


class Change(NamedTuple):
    """How a step changes the scale: at most one of the two is True."""

    grows: jax.Array
    backs_off: jax.Array


def backed_off(rule: Any, scale: jax.Array) -> jax.Array:
    """Return the scale after a backoff, which never raises it, even out of range."""
    minimum, maximum = float32(rule, "min_scale", "max_scale")
    (backoff,) = float32(rule, "backoff_factor")
    return jnp.minimum(scale, jnp.clip(scale * backoff, minimum, maximum))


def moved(rule: Any, state: LossScaleState, change: Change) -> jax.Array:
    """Return the scale after a step.

    It is clipped to the limits, except that growth never lowers a scale and backoff
    never raises one, even if the scale was out of range.
    """
    minimum, maximum = float32(rule, "min_scale", "max_scale")
    (growth,) = float32(rule, "growth_factor")
    scale = normal(state.loss_scale, rule.init_scale)
    grown = jnp.maximum(scale, jnp.clip(scale * growth, minimum, maximum))
    kept = jnp.clip(scale, minimum, maximum)
    scale = jnp.where(change.backs_off, backed_off(rule, scale), kept)
    return jnp.where(change.grows, grown, scale)


def advance(
    rule: Any, state: LossScaleState, grads_finite: Any, restart: int = 0
) -> tuple[LossScaleState, Change]:
    """Return the state with every field updated but the scale, and how that changes.

    ``restart`` is the growth tracker's value after a non-finite step.
    """
    state = recorded(state, grads_finite)
    grads_finite = state.grads_finite
    interval, allowance = count(rule.growth_interval), count(rule.hysteresis)

    # A checkpoint may hold any counters.
    growth_tracker = optax.safe_increment(jnp.maximum(state.growth_tracker, restart))
    grows = grads_finite & (growth_tracker >= interval)
    growth_tracker = jnp.where(grows, 0, growth_tracker)

    hysteresis_tracker = jnp.clip(state.hysteresis_tracker, 0, allowance)
    left = jnp.maximum(hysteresis_tracker - 1, 0)
    backs_off = ~grads_finite & (left == 0)
    refills = {
        "finite": grads_finite,
        "growth": grows,
        "change": grows | backs_off,
    }[rule.hysteresis_refill]
    hysteresis_tracker = jnp.where(grads_finite, hysteresis_tracker, left)
    new_state = state._replace(
        growth_tracker=jnp.where(grads_finite, growth_tracker, restart),
        hysteresis_tracker=jnp.where(refills, allowance, hysteresis_tracker),
    )
    return new_state, Change(grows, backs_off)
