"""The rule that searches for the largest scale that does not overflow."""

import dataclasses
from typing import Literal, final

import jax
import jax.numpy as jnp
import optax

from .._state import LossScaleState
from .base import LossScale, check_fields, checked_state, compile_for_rule


@final
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
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
        min_scale: the smallest scale to back off to, from 2**-126. The default is the
            smallest normal value of float16. With ``min_scale=init_scale`` the scale
            never backs off.
        max_scale: the largest scale to grow to, up to 2**126. With
            ``max_scale=init_scale`` the scale never grows.
        hysteresis: how many non-finite steps it takes to lower the scale, 1 or more.
        hysteresis_refill: the event that resets ``hysteresis_tracker``: any
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

    init_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1
    hysteresis_refill: Literal["finite", "growth", "change"] = "finite"

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self) -> LossScaleState:
        return LossScaleState.create(self.init_scale, self.hysteresis)

    def update(
        self, state: LossScaleState, grads_finite: "jax.typing.ArrayLike"
    ) -> LossScaleState:
        return self._compiled(checked_state(self, state, grads_finite), grads_finite)

    @compile_for_rule
    def _compiled(
        self, state: LossScaleState, grads_finite: jax.Array
    ) -> LossScaleState:
        state = state.record(grads_finite)
        finite = state.applied

        growth_tracker = jnp.where(
            finite, optax.safe_increment(state.growth_tracker), 0
        )
        grows = growth_tracker >= self.growth_interval

        # A restored tracker may be larger than the hysteresis of this rule.
        hysteresis_tracker = jnp.minimum(state.hysteresis_tracker, self.hysteresis)
        left = jnp.maximum(hysteresis_tracker - 1, 0)
        hysteresis_tracker = jnp.where(finite, hysteresis_tracker, left)
        backs_off = ~finite & (hysteresis_tracker == 0)
        refills = {"finite": finite, "growth": grows, "change": grows | backs_off}
        refill = refills[self.hysteresis_refill]

        # A restored scale may be outside the limits.
        scale = jnp.clip(state.loss_scale, self.min_scale, self.max_scale)
        scale = jnp.where(grows, scale * self.growth_factor, scale)
        scale = jnp.where(backs_off, scale * self.backoff_factor, scale)
        return state._replace(
            loss_scale=jnp.clip(scale, self.min_scale, self.max_scale),
            growth_tracker=jnp.where(grows, 0, growth_tracker),
            hysteresis_tracker=jnp.where(refill, self.hysteresis, hysteresis_tracker),
        )
