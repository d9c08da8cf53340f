"""The rule that finds the largest scale that does not overflow."""

import dataclasses
from typing import Literal, final

import jax

from .._state import LossScaleState
from .arguments import (
    check_backoff_factor,
    check_growth_factor,
    check_growth_interval,
    check_hysteresis,
    check_hysteresis_refill,
    check_init_scale,
    check_max_scale,
    check_min_scale,
    check_order,
    settle,
)
from .base import LossScale, compiled
from .growth import advance, moved
from .soundness import count, first_scale


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale(LossScale):
    """Raise the scale while gradients stay finite, lower it when they do not.

    ::

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

    ``hysteresis_refill`` says when ``hysteresis_tracker`` returns to ``hysteresis``:

    - ``"finite"``: at any finite step (Apex, DeepSpeed's ``consecutive_hysteresis``);
    - ``"growth"``: only when the scale grows; until then every further non-finite
      step backs off (Megatron, DeepSpeed);
    - ``"change"``: when the scale grows or backs off, so non-finite steps add up over
      finite ones (``decr_every_n_nan_or_inf`` in ``tf.contrib``).

    A restored scale outside the new limits is clipped on the first step that leaves it
    unchanged; a growth never lowers the scale and a backoff never raises it. A scale
    that is NaN starts again from ``init_scale``.

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``. The default is
            the largest power of two that float16 holds.
        growth_factor: what the scale is multiplied by after ``growth_interval`` finite
            steps in a row, more than 1. With ``max_scale=init_scale`` it never grows.
        backoff_factor: what it is multiplied by after a non-finite step, between 0
            and 1. With ``min_scale=init_scale`` it never backs off.
        growth_interval: how many finite steps in a row raise the scale, 1 or more.
        min_scale: the least the scale backs off to, from 2**-126. With
            ``max_scale``, keeps the scale and its reciprocal normal float32 numbers.
        max_scale: the most it grows to, up to 2**126.
        hysteresis: how many non-finite steps it takes to back off, 1 or more.
        hysteresis_refill: ``"finite"``, ``"growth"`` or ``"change"``, as above.

    Raises:
        ValueError: if an argument is out of range, as it is or rounded to float32.

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
        "Choosing A Scaling Factor"
    """

    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    hysteresis_refill: Literal["finite", "growth", "change"] = "finite"

    def __post_init__(self) -> None:
        check_hysteresis_refill(self.hysteresis_refill)
        settle(
            self,
            init_scale=check_init_scale(self.init_scale),
            growth_factor=check_growth_factor(self.growth_factor),
            backoff_factor=check_backoff_factor(self.backoff_factor),
            growth_interval=check_growth_interval(self.growth_interval),
            min_scale=check_min_scale(self.min_scale),
            max_scale=check_max_scale(self.max_scale),
            hysteresis=check_hysteresis(self.hysteresis),
        )
        check_order(
            min_scale=self.min_scale,
            init_scale=self.init_scale,
            max_scale=self.max_scale,
        )

    def init(self) -> LossScaleState:
        scale, allowance = first_scale(self.init_scale), count(self.hysteresis)
        return LossScaleState.create(scale, allowance)

    @compiled
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        new_state, change = advance(self, state, grads_finite)
        return new_state._replace(loss_scale=moved(self, state, change))
