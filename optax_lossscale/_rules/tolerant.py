"""The rule that tolerates a share of overflows (fairseq, metaseq)."""

import dataclasses
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._state import LossScaleState
from .._validation import check
from .base import LossScale, check_fields, compiled
from .growth import Change, moved

_LARGEST = np.iinfo(np.int32).max


class TolerantState(NamedTuple):
    """What `TolerantLossScale` remembers, in ``LossScaleState.rule_state``.

    Every field is an int32 array of shape ``()`` and saturates.

    Attributes:
        growth_interval: the current growth interval.
        steps_since_change: steps since the scale last grew or backed off.
        overflows_since_backoff: non-finite steps since it last backed off.

    Examples:
        >>> import optax_lossscale as ls
        >>> int(ls.TolerantLossScale().init().rule_state.growth_interval)
        2000
    """

    growth_interval: jax.Array
    steps_since_change: jax.Array
    overflows_since_backoff: jax.Array


@final
@dataclasses.dataclass(frozen=True)
class TolerantLossScale(LossScale):
    """Back off only if the share of non-finite steps reaches a tolerance.

    Use it if single overflows should not lower the scale. The affected steps are
    skipped all the same. After each step it does the following::

        steps_since_change += 1
        if grads_finite:
            growth_tracker += 1
            if growth_tracker % growth_interval == 0:
                loss_scale = min(loss_scale * growth_factor, max_scale)
                steps_since_change = 0
                growth_interval *= growth_factor             # if interval_follows_scale
        else:                                   # and the step is skipped
            growth_tracker = 0
            overflows_since_backoff += 1
            if overflows_since_backoff / steps_since_change >= tolerance:
                loss_scale = max(loss_scale * backoff_factor, min_scale)
                steps_since_change = overflows_since_backoff = 0
                growth_interval = max(growth_interval // growth_factor, 1)   # likewise

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``.
        growth_factor: the factor by which the scale grows, more than 1. If the interval
            follows the scale, it must be a whole number up to 2147483647.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: how many finite steps in a row raise the scale, 1 or more.
        min_scale: the smallest scale to back off to, from 2**-126.
        max_scale: the largest scale to grow to, up to 2**126.
        tolerance: the share of non-finite steps since the scale last changed at which
            it backs off, from 0 to 1. With 0, it backs off at every non-finite step.
        interval_follows_scale: whether to multiply the interval by ``growth_factor``
            when the scale grows and to divide it when the scale backs off. A low scale
            then recovers quickly, and a high one seldom grows.

    Raises:
        ValueError: if an argument is out of range or traced.

    Examples:
        This rule tolerates one non-finite step in four, but not two in five:

        >>> import optax_lossscale as ls
        >>> rule = ls.TolerantLossScale(tolerance=0.3)
        >>> state, scales = rule.init(), []
        >>> for grads_finite in (True, True, True, False, False):
        ...     state = rule.update(state, grads_finite)
        ...     scales.append(float(state.loss_scale))
        >>> scales
        [32768.0, 32768.0, 32768.0, 32768.0, 16384.0]

    References:
        Ott et al., `Scaling Neural Machine Translation
        <https://arxiv.org/abs/1806.00187>`_, 2018, section 3.1 (fairseq);
        `metaseq issue 4 <https://github.com/facebookresearch/metaseq/issues/4>`_
        (the interval)
    """

    init_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    tolerance: float = 0.0
    interval_follows_scale: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "min_scale", "init_scale", "max_scale")
        if self.interval_follows_scale:
            check("whole_factor", self.growth_factor, "growth_factor")

    def init(self) -> LossScaleState:
        counts = (jnp.asarray(x, jnp.int32) for x in (self.growth_interval, 0, 0))
        rule_state = TolerantState(*counts)
        return LossScaleState.create(self.init_scale, rule_state=rule_state)

    @compiled
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        new_state = state.record(grads_finite)
        finite = new_state.applied
        # A counter that has reached the largest int32 stays there. That number is
        # prime, so no smaller interval above 1 divides it.
        counts = state.rule_state
        interval = counts.growth_interval
        steps = optax.safe_increment(counts.steps_since_change)
        overflows = optax.safe_increment(counts.overflows_since_backoff)
        tracker = optax.safe_increment(state.growth_tracker)
        change = Change(
            grows=finite & (tracker % interval == 0),
            backs_off=~finite & (overflows / steps >= self.tolerance),
        )

        new_interval = interval
        if self.interval_follows_scale:
            factor = int(self.growth_factor)
            fits = interval <= _LARGEST // factor
            longer = jnp.where(fits, interval * factor, interval)
            shorter = jnp.maximum(interval // factor, 1)
            new_interval = jnp.where(change.grows, longer, interval)
            new_interval = jnp.where(change.backs_off, shorter, new_interval)
        overflows = jnp.where(finite, counts.overflows_since_backoff, overflows)
        return new_state._replace(
            loss_scale=moved(self, state, change),
            growth_tracker=jnp.where(finite, tracker, 0),
            rule_state=TolerantState(
                growth_interval=new_interval,
                steps_since_change=jnp.where(change.grows | change.backs_off, 0, steps),
                overflows_since_backoff=jnp.where(change.backs_off, 0, overflows),
            ),
        )
