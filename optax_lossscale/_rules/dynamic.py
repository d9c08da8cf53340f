"""The rule that searches for the largest scale that does not overflow."""

import dataclasses
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from .._state import LossScaleState
from . import fields
from .base import LossScale, check_and_compile, check_fields
from .fields import make_field


@dataclasses.dataclass(frozen=True)
class GrowingLossScale(LossScale):
    """The numbers and the first state of `DynamicLossScale` and `VerbatimLossScale`."""

    init_scale: float = make_field(2.0**15, fields.scale)
    _: dataclasses.KW_ONLY
    growth_factor: float = make_field(2.0, fields.growth_factor)
    backoff_factor: float = make_field(0.5, fields.backoff_factor)
    growth_interval: int = make_field(2000, fields.growth_interval)
    min_scale: float = make_field(1.0, fields.scale)
    max_scale: float = make_field(2.0**24, fields.scale)
    hysteresis: int = make_field(1, fields.hysteresis)
    hysteresis_refill: Literal["finite", "growth", "change"] = make_field(
        "finite", fields.refill
    )

    def init(self) -> LossScaleState:
        return LossScaleState.create(self.init_scale, self.hysteresis)


@final
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(GrowingLossScale):
    """Raise the scale while gradients stay finite, and lower it when they do not.

    This is the default rule. After each step it does the following::

        if grads_finite:
            growth_tracker += 1
            if growth_tracker >= growth_interval:
                loss_scale = min(loss_scale * growth_factor, max_scale)
                growth_tracker = 0
        else:                                   # and the step is skipped
            growth_tracker = 0
            hysteresis_tracker = max(hysteresis_tracker - 1, 0)
            if hysteresis_tracker == 0:
                loss_scale = max(loss_scale * backoff_factor, min_scale)

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``. The default is
            the largest power of two that float16 can represent.
        growth_factor: the factor by which the scale grows, more than 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: how many finite steps in a row raise the scale, 1 or more.
        min_scale: the smallest scale to back off to, from 2**-126. With
            ``min_scale=init_scale`` the scale never backs off.
        max_scale: the largest scale to grow to, up to 2**126. With
            ``max_scale=init_scale`` the scale never grows.
        hysteresis: how many non-finite steps it takes to back off, 1 or more.
        hysteresis_refill: what resets ``hysteresis_tracker`` to ``hysteresis``: any
            ``"finite"`` step; only a ``"growth"``; or any ``"change"`` of the scale, so
            that non-finite steps are counted across finite ones.

    Raises:
        ValueError: if an argument is out of range or traced.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.DynamicLossScale(init_scale=1024.0, growth_interval=2)
        >>> state = rule.init()
        >>> for grads_finite in (True, True, False):
        ...     state = rule.update(state, grads_finite)
        ...     print(float(state.loss_scale))
        1024.0
        2048.0
        1024.0

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor". ``hysteresis_refill``: ``"finite"`` as in Apex,
        ``"growth"`` as in Megatron-LM, ``"change"`` as in ``tf.contrib``.
    """

    def __post_init__(self) -> None:
        check_fields(self, "min_scale", "init_scale", "max_scale")

    @check_and_compile
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        new_state, change = count_step(self, state, grads_finite)
        scale = clip_scale(self, state.loss_scale)
        higher = clip_scale(self, scale * self.growth_factor)
        lower = clip_scale(self, scale * self.backoff_factor)
        scale = jnp.where(change.backs_off, lower, scale)
        scale = jnp.where(change.grows, higher, scale)
        return new_state._replace(loss_scale=scale)


class Change(NamedTuple):
    """How a step changes the scale: at most one of the two is True."""

    grows: jax.Array
    backs_off: jax.Array


def count_step(
    rule: GrowingLossScale, state: LossScaleState, grads_finite: Any, restart: int = 0
) -> tuple[LossScaleState, Change]:
    """Count a step in every field except the scale. Return how the scale changes, too.

    ``restart`` is the growth tracker's value after a non-finite step.
    """
    state = state.record(grads_finite)
    grads_finite = state.applied

    growth_tracker = optax.safe_increment(state.growth_tracker)
    grows = grads_finite & (growth_tracker >= rule.growth_interval)
    growth_tracker = jnp.where(grows, 0, growth_tracker)

    hysteresis_tracker = jnp.minimum(state.hysteresis_tracker, rule.hysteresis)
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
        hysteresis_tracker=jnp.where(refills, rule.hysteresis, hysteresis_tracker),
    )
    return new_state, Change(grows, backs_off)


def clip_scale(rule: Any, scale: jax.Array) -> jax.Array:
    return jnp.clip(scale, rule.min_scale, rule.max_scale)
