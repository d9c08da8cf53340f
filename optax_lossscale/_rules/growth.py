"""What the growing rules share: their numbers, the counters and the next scale."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._state import LossScaleState
from . import fields
from .base import LossScale
from .fields import checked


@dataclasses.dataclass(frozen=True)
class GrowingLossScale(LossScale):
    """The numbers and the first state of `DynamicLossScale` and `VerbatimLossScale`."""

    init_scale: float = checked(2.0**15, fields.scale)
    _: dataclasses.KW_ONLY
    growth_factor: float = checked(2.0, fields.growth_factor)
    backoff_factor: float = checked(0.5, fields.backoff_factor)
    growth_interval: int = checked(2000, fields.growth_interval)
    min_scale: float = checked(1.0, fields.scale)
    max_scale: float = checked(2.0**24, fields.scale)
    hysteresis: int = checked(1, fields.hysteresis)
    hysteresis_refill: Literal["finite", "growth", "change"] = checked(
        "finite", fields.refill
    )

    def init(self) -> LossScaleState:
        return LossScaleState.create(self.init_scale, self.hysteresis)


class Change(NamedTuple):
    """How a step changes the scale: at most one of the two is True."""

    grows: jax.Array
    backs_off: jax.Array


def counted(
    rule: GrowingLossScale, state: LossScaleState, grads_finite: Any, restart: int = 0
) -> tuple[LossScaleState, Change]:
    """Return the state with every field updated but the scale, and how that changes.

    ``restart`` is the growth tracker's value after a non-finite step.
    """
    state = state.record(grads_finite)
    grads_finite = state.applied

    growth_tracker = optax.safe_increment(state.growth_tracker)
    grows = grads_finite & (growth_tracker >= rule.growth_interval)
    growth_tracker = jnp.where(grows, 0, growth_tracker)

    tracker = jnp.minimum(state.hysteresis_tracker, rule.hysteresis)
    hysteresis_tracker = jnp.where(state.is_fixed, rule.hysteresis, tracker)
    left = jnp.maximum(hysteresis_tracker - 1, 0)
    backs_off = ~grads_finite & (left == 0)
    refills = {
        "finite": grads_finite,
        "growth": grows,
        "change": grows | backs_off,
    }[rule.hysteresis_refill]
    hysteresis_tracker = jnp.where(grads_finite, hysteresis_tracker, left)
    new_state = state._replace(
        is_fixed=jnp.zeros((), jnp.bool_),
        growth_tracker=jnp.where(grads_finite, growth_tracker, restart),
        hysteresis_tracker=jnp.where(refills, rule.hysteresis, hysteresis_tracker),
    )
    return new_state, Change(grows, backs_off)


def clipped(rule: Any, scale: jax.Array) -> jax.Array:
    return jnp.clip(scale, rule.min_scale, rule.max_scale)
