"""The rule that keeps the largest gradient a fixed distance below overflow."""

import dataclasses
import math
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

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
from .growth import backed_off, float32, power_of_two
from .soundness import first_scale, normal


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
        ValueError: if an argument is out of range, as it is or rounded to float32.

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
        return LossScaleState.create(first_scale(self.init_scale), memory=memory)

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

        Raises:
            TypeError: if ``state`` is no LossScaleState.
            ValueError: as for `LossScale.update`, or if ``max_magnitude`` is not one
                real number.
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

        bound, exponent = self._bound
        # The margin keeps an inexact division from costing another octave.
        top = jnp.minimum(jnp.ldexp(bound, jnp.minimum(exponent, 128)), 2.0**127)
        unseen = _magnitude((1 - 2.0**-12) * top / (scale * backoff))
        magnitude = jnp.where(
            new_state.grads_finite,
            jnp.maximum(remembered * decay, seen),
            jnp.maximum(remembered, unseen),
        )
        target = _scale_for(magnitude, bound, exponent)
        target = jnp.clip(target, minimum, maximum)
        target = jnp.where(magnitude > 0, target, first)
        lowered = jnp.minimum(target, backed_off(self, scale))
        loss_scale = jnp.where(new_state.grads_finite, target, lowered)
        return new_state._replace(
            loss_scale=loss_scale, memory=HeadroomMemory(magnitude)
        )

    @property
    def _bound(self) -> tuple[jax.Array, jax.Array]:
        """What the scaled gradient may come to: a number from 0.5 to 1, and octaves.

        It is rounded down to float32. With a traced headroom that is not whole it may
        be lower by 2**-20, and is never higher.
        """
        largest = float(jnp.finfo(self.dtype).max)
        if not isinstance(self.headroom, jax.core.Tracer):
            bound, exponent = math.frexp(largest / 2.0**self.headroom)
            return _rounded_down(bound), jnp.asarray(exponent, jnp.int32)
        bound, exponent = math.frexp(largest)
        headroom = jnp.clip(*float32(self, "headroom"), 0, 126)
        whole = jnp.floor(headroom)
        rest = headroom - whole
        # `jnp.exp2` is a few units in the last place off, to either side.
        part = jnp.where(rest > 0, jnp.exp2(-rest) * (1 - 2.0**-21), 1.0)
        mantissa, octaves = jnp.frexp(part * _rounded_down(bound))
        return mantissa, exponent + octaves - whole.astype(jnp.int32)


def _rounded_down(x: float) -> jax.Array:
    rounded = np.float32(x)
    lower = np.nextafter(rounded, np.float32(0))
    return jnp.asarray(lower if float(rounded) > x else rounded)


def _scale_for(
    magnitude: jax.Array, bound: jax.Array, exponent: jax.Array
) -> jax.Array:
    """Return the largest power of two by which a magnitude stays within a bound.

    It compares mantissas: a logarithm would round to either side.
    """
    mantissa, octaves = jnp.frexp(jnp.maximum(magnitude, SMALLEST_SCALE))
    above = (mantissa > bound).astype(jnp.int32)
    return power_of_two((exponent - octaves - above).astype(jnp.float32))


def _magnitude(x: jax.typing.ArrayLike) -> jax.Array:
    """Return a magnitude as a finite float32; one that is NaN says nothing."""
    x = jnp.asarray(x, jnp.float32)
    return jnp.where(jnp.isnan(x), 0, jnp.clip(x, 0, jnp.finfo(jnp.float32).max))
