"""The rule that models the largest gradient as log-normal."""

import dataclasses
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp

from .._precision import SMALLEST_SCALE, power_of_two
from .._state import LossScaleState
from .._tree import select
from .base import LossScale, check_fields, compiled
from .growth import clipped


class LogNormalState(NamedTuple):
    """What `LogNormalLossScale` remembers, in ``LossScaleState.rule_state``.

    Every field is a float32 array of shape ``()``. The averages start at 0, and the
    weights correct them for that, as Adam corrects its moments.

    Attributes:
        fast_mean: average of log2 of the largest gradient, with decay ``beta1``.
        slow_mean: the same average with decay ``beta2``.
        slow_square: average of its square, with decay ``beta2``.
        fast_weight: ``beta1`` to the power of the number of steps seen.
        slow_weight: ``beta2`` to the power of the number of steps seen.

    Examples:
        >>> import optax_lossscale as ls
        >>> float(ls.LogNormalLossScale().init().rule_state.fast_weight)
        1.0
    """

    fast_mean: jax.Array
    slow_mean: jax.Array
    slow_square: jax.Array
    fast_weight: jax.Array
    slow_weight: jax.Array


@final
@dataclasses.dataclass(frozen=True)
class LogNormalLossScale(LossScale):
    """Choose the scale from statistics of the gradients, for a given overflow rate.

    This is the LogMax rule of OpenSeq2Seq. It models the largest gradient of a step as
    log-normal, and leaves more room below overflow if that gradient varies more. After
    each step it does the following, and clips the scale to ``min_scale`` and
    ``max_scale``::

        x = log2(largest gradient) if grads_finite else nonfinite_log
        mean = average of x with decay beta1                  # with bias correction
        deviation = standard deviation of x with decay beta2  # likewise
        loss_scale = 2**(log_max - mean - overflow_std_dev * deviation)

    A step whose gradients are all zero changes neither the averages nor the scale.

    Args:
        init_scale: the scale of the first step, from ``min_scale`` to ``max_scale``.
        log_max: log2 of the magnitude at which gradients overflow, from -126 to 128.
        beta1: the decay of the mean, between 0 and 1.
        beta2: the decay of the standard deviation, between 0 and 1.
        overflow_std_dev: how many standard deviations to leave free below overflow,
            from 0 to 100. With 3.09, one step in a thousand overflows in the model.
        nonfinite_log: the log2 that a step with non-finite gradients counts as.
        power_of_two: whether to round the scale down to a power of two, so that
            unscaling is exact.
        min_scale: the smallest scale, from 2**-126.
        max_scale: the largest scale, up to 2**126.

    Raises:
        ValueError: if an argument is out of range or traced.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.LogNormalLossScale()
        >>> state = rule.init()
        >>> for max_magnitude in (0.25, 1.0, 0.0, 0.5):
        ...     state = rule.update(state, True, max_magnitude)
        ...     print(float(state.loss_scale))
        262144.0
        8192.0
        8192.0
        16384.0

    References:
        Kuchaiev et al., `Mixed-Precision Training for NLP and Speech Recognition with
        OpenSeq2Seq <https://arxiv.org/abs/1805.10387>`_, 2018, and the
        `documentation of OpenSeq2Seq
        <https://nvidia.github.io/OpenSeq2Seq/html/mixed-precision.html>`_ (LogMax)
    """

    init_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    log_max: float = 16.0
    beta1: float = 0.99
    beta2: float = 0.999
    overflow_std_dev: float = 3.09
    nonfinite_log: float = 16.0
    power_of_two: bool = True
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    uses_max_magnitude: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, "min_scale", "init_scale", "max_scale")

    def init(self) -> LossScaleState:
        return LossScaleState.create(self.init_scale, rule_state=_first_state())

    @compiled
    def update(
        self,
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        max_magnitude: jax.typing.ArrayLike = 0.0,
    ) -> LossScaleState:
        new_state = state.record(grads_finite)
        fast, slow = self.beta1, self.beta2
        magnitude = jnp.asarray(max_magnitude, jnp.float32)
        magnitude = jnp.clip(magnitude, SMALLEST_SCALE, jnp.finfo(jnp.float32).max)
        seen = jnp.log2(magnitude)

        old = state.rule_state
        scale = clipped(self, state.loss_scale)
        # Retries found it if it is lower than the scale of the averages. Then gradients
        # just fit, whatever was measured.
        overflowed = state.growth_tracker <= 0
        found = overflowed & (scale < self._scale_for(old))
        seen = jnp.where(found, jnp.maximum(seen, self.log_max - jnp.log2(scale)), seen)
        x = jnp.where(new_state.applied, seen, self.nonfinite_log)
        known = ~new_state.applied | (jnp.asarray(max_magnitude) > 0)

        # Python subtracts and the result is rounded once, as in OpenSeq2Seq.
        averages = LogNormalState(
            fast_mean=fast * old.fast_mean + (1 - fast) * x,
            slow_mean=slow * old.slow_mean + (1 - slow) * x,
            slow_square=slow * old.slow_square + (1 - slow) * (x * x),
            fast_weight=fast * old.fast_weight,
            slow_weight=slow * old.slow_weight,
        )
        averages = select(known, averages, old)
        excess = jnp.log2(self._scale_for(averages) / scale)
        averages = _shifted(averages, jnp.where(found, jnp.maximum(excess, 0), 0))
        return new_state._replace(
            loss_scale=self._scale_for(averages),
            growth_tracker=new_state.applied.astype(jnp.int32),
            rule_state=averages,
        )

    def _scale_for(self, averages: LogNormalState) -> jax.Array:
        started = averages.fast_weight < 1
        weights = averages.fast_weight, averages.slow_weight
        fast, slow = (jnp.where(started, 1 - x, 1) for x in weights)
        mean = averages.fast_mean / fast
        slow_mean = averages.slow_mean / slow
        square = averages.slow_square / slow
        deviation = jnp.sqrt(jnp.maximum(square - slow_mean * slow_mean, 0))
        power = self.log_max - (mean + self.overflow_std_dev * deviation)
        scale = power_of_two(power) if self.power_of_two else jnp.exp2(power)
        return jnp.where(started, clipped(self, scale), self.init_scale)


def _shifted(averages: LogNormalState, octaves: jax.Array) -> LogNormalState:
    """Move the mean, and keep the deviation."""
    weight = 1 - averages.slow_weight
    mean = averages.slow_mean
    return averages._replace(
        fast_mean=averages.fast_mean + octaves * (1 - averages.fast_weight),
        slow_mean=mean + octaves * weight,
        slow_square=averages.slow_square + octaves * (2 * mean + octaves * weight),
    )


def _first_state() -> LogNormalState:
    zeros, ones = (jnp.full(3, x, jnp.float32) for x in (0, 1))
    return LogNormalState(*zeros, *ones[:2])
