"""The rule that finds the largest scale that does not overflow."""

import dataclasses
from collections.abc import Callable
from typing import Literal, final

import jax
import jax.numpy as jnp
import optax

from ._loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale, compiled
from ._state import LossScaleState
from ._validation import check_count, check_number

_REFILLS = ("finite", "growth", "change")


def _is_scale(x: float) -> bool:
    return SMALLEST_SCALE <= x <= LARGEST_SCALE


# What each number accepts, the same in words, and the way out of an error.
_NUMBERS: dict[str, tuple[Callable[[float], bool], str, str]] = {
    "init_scale": (
        _is_scale,
        "a number from 2**-126 to 2**126",
        "It is the first loss scale; 2.0**15 suits float16.",
    ),
    "growth_factor": (
        lambda x: 1 < x <= LARGEST_SCALE,
        "a number above 1, up to 2**126",
        "It multiplies the loss scale after `growth_interval` finite steps; to keep "
        "the scale from growing, set `max_scale` to `init_scale`.",
    ),
    "backoff_factor": (
        lambda x: 0 < x < 1,
        "in (0, 1)",
        "It multiplies the loss scale after non-finite gradients; to keep the scale "
        "from backing off, set `min_scale` to `init_scale`.",
    ),
    "min_scale": (
        _is_scale,
        "a number from 2**-126 to 2**126",
        "It is the least the loss scale backs off to; 1 is usual.",
    ),
    "max_scale": (
        _is_scale,
        "a number from 2**-126 to 2**126",
        "It is the most the loss scale grows to; 2.0**24 is usual.",
    ),
}
_COUNTS = {
    "growth_interval": "It is how many finite steps in a row make the loss scale grow.",
    "hysteresis": "It is how many non-finite steps it takes to lower the loss scale; "
    "1 lowers it at once.",
}


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

    A state that was saved under other limits is brought inside these by the first
    step that neither grows nor backs off; a growth never lowers the scale and a
    backoff never raises it. A scale that is NaN starts again from ``init_scale``.

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``. The default is
            the largest power of two that float16 holds.
        growth_factor: what the scale is multiplied by after ``growth_interval`` finite
            steps in a row, more than 1.
        backoff_factor: what it is multiplied by after a non-finite step, between 0
            and 1.
        growth_interval: how many finite steps in a row raise the scale, 1 or more.
        min_scale: the least the scale backs off to, from 2**-126. With
            ``max_scale``, keeps the scale and its reciprocal normal float32 numbers.
        max_scale: the most it grows to, up to 2**126.
        hysteresis: how many non-finite steps it takes to back off, 1 or more.
        hysteresis_refill: ``"finite"``, ``"growth"`` or ``"change"``, as above.

    Raises:
        ValueError: if an argument breaks its rule.

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
        for name, (accepts, rule, advice) in _NUMBERS.items():
            value = check_number(name, getattr(self, name), accepts, rule, advice)
            object.__setattr__(self, name, value)
        for name, advice in _COUNTS.items():
            object.__setattr__(
                self, name, check_count(name, getattr(self, name), advice)
            )
        if self.hysteresis_refill not in _REFILLS:
            raise ValueError(
                f"`hysteresis_refill` must be one of {_REFILLS}, got "
                f"{self.hysteresis_refill!r}. It says when the allowance of "
                "`hysteresis` non-finite steps is full again."
            )
        self._check_order("min_scale", "init_scale")
        self._check_order("init_scale", "max_scale")

    def _check_order(self, lower: str, upper: str) -> None:
        low, high = getattr(self, lower), getattr(self, upper)
        if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
            return
        if low > high:
            raise ValueError(
                f"`{lower}` must not exceed `{upper}`, got {lower}={low!r} and "
                f"{upper}={high!r}. Lower `{lower}` or raise `{upper}`."
            )

    def init(self) -> LossScaleState:
        return LossScaleState.create(self.init_scale, self.hysteresis)

    @compiled
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        new_state = state.record(grads_finite)
        grads_finite = new_state.grads_finite
        # Hyperparameters that inject_hyperparams traces come in any dtype.
        minimum, maximum, initial, growth, backoff = (
            jnp.asarray(x, jnp.float32)
            for x in (
                self.min_scale,
                self.max_scale,
                self.init_scale,
                self.growth_factor,
                self.backoff_factor,
            )
        )
        interval, allowance = (
            jnp.asarray(x, jnp.int32) for x in (self.growth_interval, self.hysteresis)
        )

        # A checkpoint may hold any counters.
        growth_tracker = optax.safe_increment(jnp.maximum(state.growth_tracker, 0))
        grows = grads_finite & (growth_tracker >= interval)

        hysteresis_tracker = jnp.clip(state.hysteresis_tracker, 0, allowance)
        left = jnp.maximum(hysteresis_tracker - 1, 0)
        backs_off = ~grads_finite & (left == 0)
        refills = {
            "finite": grads_finite,
            "growth": grows,
            "change": grows | backs_off,
        }[self.hysteresis_refill]
        hysteresis_tracker = jnp.where(grads_finite, hysteresis_tracker, left)

        scale = jnp.where(jnp.isnan(state.loss_scale), initial, state.loss_scale)
        scale = jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
        grown = jnp.maximum(scale, jnp.clip(scale * growth, minimum, maximum))
        backed_off = jnp.minimum(scale, jnp.clip(scale * backoff, minimum, maximum))
        kept = jnp.clip(scale, minimum, maximum)
        return new_state._replace(
            loss_scale=jnp.where(grows, grown, jnp.where(backs_off, backed_off, kept)),
            growth_tracker=jnp.where(grads_finite & ~grows, growth_tracker, 0),
            hysteresis_tracker=jnp.where(refills, allowance, hysteresis_tracker),
        )
