"""The rule that keeps the largest gradient a fixed distance below overflow."""

import dataclasses
import math
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp

from .._precision import SMALLEST_SCALE
from .._state import LossScaleState, recorded
from .._validation import check_count, check_float_dtype, check_number
from .arguments import (
    check_backoff_factor,
    check_init_scale,
    check_max_scale,
    check_min_scale,
    check_order,
    settle,
)
from .base import LossScale, compiled
from .growth import backed_off, float32, normal, power_of_two


class HeadroomMemory(NamedTuple):
    """What `HeadroomLossScale` remembers, in ``LossScaleState.memory``.

    Attributes:
        max_magnitude: float32 of shape ``()``, the decaying maximum of the gradients'
            largest absolute values; 0 before there is one.
    """

    max_magnitude: jax.Array


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadroomLossScale(LossScale):
    """Keep the largest gradient a number of octaves below the overflow of a type.

    The largest gradient is seen in every step, so the scale follows it at once, up and
    down, where `DynamicLossScale` waits for a whole interval to grow and for an
    overflow to know that it has grown too far. ::

        if grads_finite:
            max_magnitude = max(max_magnitude * 0.5**(1 / half_life), largest gradient)
        else:                                   # and the step is skipped
            max_magnitude = what gives loss_scale * backoff_factor, or more
        loss_scale = the largest power of two for which
            loss_scale * max_magnitude <= 65504 / 2**headroom        # in float16

    and from ``min_scale`` to ``max_scale``. Until a gradient other than zero has been
    seen the scale is ``init_scale``. An overflow inside the network, of values that are
    no gradients of parameters, is not seen before it happens: it counts as a gradient
    that would have called for the lower scale, and is forgotten as slowly as any other
    maximum.

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``.
        headroom: how many octaves (factors of two) stay free between the largest
            gradient of the recent steps and overflow, 0 or more, for gradients that
            grow from one step to the next.
        dtype: the name of the floating-point type that gradients overflow in, or the
            type itself.
        half_life: after how many steps a maximum counts for half of what it was, 1 or
            more.
        backoff_factor: what a non-finite step multiplies the scale by, between 0
            and 1. A large step down costs little where the next gradient says how far
            to come up again.
        min_scale: the least scale, from 2**-126.
        max_scale: the largest scale, up to 2**126.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.HeadroomLossScale(headroom=4)
        >>> state = rule.update(rule.init(), True, 0.001)
        >>> float(state.loss_scale), 0.001 * float(state.loss_scale) <= 65504 / 2**4
        (2097152.0, True)

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor", for the largest gradient as the measure;
        `Transformer Engine
        <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/>`_,
        ``DelayedScaling``, for the maximum over past steps
    """

    init_scale: float = 2.0**15
    headroom: float = 3.0
    dtype: str = "float16"
    half_life: int = 1000
    backoff_factor: float = 0.25
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    uses_max_magnitude: ClassVar[bool] = True

    def __post_init__(self) -> None:
        settle(
            self,
            init_scale=check_init_scale(self.init_scale),
            headroom=check_number(
                "headroom",
                self.headroom,
                lambda x: 0 <= x <= 126,
                "a number from 0 to 126",
                "It is how many octaves stay free below overflow; 3 suits most.",
            ),
            dtype=check_float_dtype(
                "dtype",
                self.dtype,
                'It is what gradients overflow in, usually "float16".',
            ).name,
            half_life=check_count(
                "half_life",
                self.half_life,
                "It is after how many steps a maximum counts for half.",
            ),
            backoff_factor=check_backoff_factor(self.backoff_factor),
            min_scale=check_min_scale(self.min_scale),
            max_scale=check_max_scale(self.max_scale),
        )
        check_order(
            min_scale=self.min_scale,
            init_scale=self.init_scale,
            max_scale=self.max_scale,
        )

    def init(self) -> LossScaleState:
        memory = HeadroomMemory(jnp.zeros((), jnp.float32))
        return LossScaleState.create(self.init_scale, memory=memory)

    @compiled
    def update(
        self,
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        max_magnitude: jax.typing.ArrayLike = 0.0,
    ) -> LossScaleState:
        """Return the state after a step.

        Args:
            state: the state whose ``loss_scale`` multiplied this step's loss.
            grads_finite: one boolean, whether all gradients were finite.
            max_magnitude: the largest absolute value of the true gradients, as
                `max_magnitude` returns it; 0 says nothing.
        """
        new_state = recorded(state, grads_finite)
        minimum, maximum = float32(self, "min_scale", "max_scale")
        first, backoff, half_life = float32(
            self, "init_scale", "backoff_factor", "half_life"
        )
        decay = jnp.exp2(-1 / half_life)
        scale = normal(state.loss_scale, self.init_scale)
        seen = _magnitude(max_magnitude)
        remembered = _magnitude(state.memory.max_magnitude)

        # The margin lets rounding not cost another octave.
        top = jnp.exp2(jnp.minimum(self._top, 127.0))
        unseen = _magnitude((1 - 2.0**-12) * top / (scale * backoff))
        magnitude = jnp.where(
            new_state.grads_finite,
            jnp.maximum(remembered * decay, seen),
            jnp.maximum(remembered, unseen),
        )
        target = jnp.clip(self._scale_for(magnitude), minimum, maximum)
        target = jnp.where(magnitude > 0, target, first)
        lowered = jnp.minimum(target, backed_off(self, scale))
        loss_scale = jnp.where(new_state.grads_finite, target, lowered)
        return new_state._replace(
            loss_scale=loss_scale, memory=HeadroomMemory(magnitude)
        )

    @property
    def _top(self) -> jax.Array:
        """The logarithm of what the scaled gradient may come to."""
        largest = math.log2(float(jnp.finfo(self.dtype).max))
        return largest - jnp.asarray(self.headroom, jnp.float32)

    def _scale_for(self, magnitude: jax.Array) -> jax.Array:
        """Return the largest power of two that leaves the headroom free."""
        mantissa, exponent = jnp.frexp(jnp.maximum(magnitude, SMALLEST_SCALE))
        # A logarithm would round powers of two to either side.
        octaves = jnp.where(mantissa > 0.5, -jnp.log2(mantissa), 1.0)
        whole = jnp.floor(self._top + octaves)
        return power_of_two(whole - exponent.astype(jnp.float32))


def _magnitude(x: jax.typing.ArrayLike) -> jax.Array:
    """Return a magnitude as a finite float32; one that is NaN says nothing."""
    x = jnp.asarray(x, jnp.float32)
    return jnp.where(jnp.isnan(x), 0, jnp.clip(x, 0, jnp.finfo(jnp.float32).max))
