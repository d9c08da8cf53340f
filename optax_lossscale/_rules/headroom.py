"""The rule that keeps the largest gradient a fixed factor below overflow."""

import dataclasses
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE, largest_power
from .._state import LossScaleState
from .._validation import check_scalar
from .base import LossScale, check_fields, checked_state, compile_for_rule


class HeadroomState(NamedTuple):
    """The ``rule_state`` of `HeadroomLossScale`: the largest recent gradient.

    Attributes:
        max_magnitude: float32 of shape ``()``, a decaying maximum of the largest
            absolute value of the gradients; 0 before the first one.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.HeadroomLossScale().init().rule_state.max_magnitude
        Array(0., dtype=float32)
    """

    max_magnitude: jax.Array


@final
@dataclasses.dataclass(frozen=True)
class HeadroomLossScale(LossScale):
    """Keep the largest gradient a fixed factor below overflow.

    Use it if the scale should fall before a larger gradient overflows. After each step
    it does the following, and clips the scale to ``min_scale`` and ``max_scale``::

        if grads_finite:
            max_magnitude = max(max_magnitude * 0.5**(1 / half_life), largest gradient)
        else:                                   # and the step is skipped
            increase max_magnitude until loss_scale <= old loss_scale * backoff_factor
        loss_scale = the largest power of two for which
            loss_scale * max_magnitude <= 65504 / 2**headroom        # in float16

    The scale is ``init_scale`` until the first gradient that is not zero.

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``.
        headroom: how many powers of two to leave free between the largest recent
            gradient and overflow, from 0 to 126.
        dtype: the floating-point dtype in which gradients overflow, or its name.
        half_life: how many steps it takes for a remembered maximum to decay to half
            its value, 1 or more.
        backoff_factor: the factor by which a non-finite step lowers the scale, between
            0 and 1.
        min_scale: the smallest scale, from 2**-126.
        max_scale: the largest scale, up to 2**126.

    Raises:
        ValueError: if an argument is out of range or traced.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.HeadroomLossScale(headroom=4)
        >>> state = rule.update(rule.init(), True, max_magnitude=0.001)
        >>> float(state.loss_scale), 0.001 * float(state.loss_scale) <= 65504 / 2**4
        (2097152.0, True)

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor" (the scale follows from the largest gradient);
        `Transformer Engine
        <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/>`_,
        ``DelayedScaling`` (the maximum over past steps)
    """

    init_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    headroom: float = 3.0
    dtype: str = "float16"
    half_life: int = 1000
    backoff_factor: float = 0.25
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24

    uses_max_magnitude: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self) -> LossScaleState:
        rule_state = HeadroomState(jnp.float32(0))
        return LossScaleState.create(self.init_scale, rule_state=rule_state)

    def update(
        self,
        state: LossScaleState,
        grads_finite: "jax.typing.ArrayLike",
        max_magnitude: "jax.typing.ArrayLike",
    ) -> LossScaleState:
        """Return the state after a step, given `max_magnitude` of unscaled gradients.

        0 and NaN are ignored.
        """
        advice = "`max_magnitude(grads)` returns one for gradients."
        check_scalar("max_magnitude", max_magnitude, "real number", advice)
        state = checked_state(self, state, grads_finite)
        return self._compiled(state, grads_finite, max_magnitude)

    @compile_for_rule
    def _compiled(
        self, state: LossScaleState, grads_finite: jax.Array, max_magnitude: jax.Array
    ) -> LossScaleState:
        new_state = state.record(grads_finite)
        scale = jnp.clip(state.loss_scale, SMALLEST_SCALE, LARGEST_SCALE)
        seen = _finite_magnitude(max_magnitude)
        remembered = _finite_magnitude(state.rule_state.max_magnitude)

        # The largest allowed scaled gradient, of a magnitude in float32.
        maxima = (float(jnp.finfo(x).max) for x in (self.dtype, jnp.float32))
        largest = min(maxima) / 2.0**self.headroom
        # Without the margin, an inexact division could halve the scale once more.
        margin = 1 - 2.0**-12

        def magnitude_for(scale: jax.Array) -> jax.Array:
            return _finite_magnitude(margin * min(largest, 2.0**127) / scale)

        def clip(scale: jax.Array) -> jax.Array:
            return jnp.clip(scale, self.min_scale, self.max_scale)

        def scale_for(magnitude: jax.Array) -> jax.Array:
            scale = clip(largest_power(magnitude, largest))
            return jnp.where(magnitude > 0, scale, self.init_scale)

        # If a retry lowered the scale, a larger gradient overflowed than is remembered.
        # Assume the one for which the rule chooses this scale.
        is_lower = scale < scale_for(remembered)
        remembered = jnp.where(is_lower, magnitude_for(scale), remembered)
        # The magnitude that overflowed is not known. Assume one that backs off.
        unseen = magnitude_for(scale * self.backoff_factor)
        magnitude = jnp.where(
            new_state.applied,
            jnp.maximum(remembered * 0.5 ** (1 / self.half_life), seen),
            jnp.maximum(remembered, unseen),
        )
        target = scale_for(magnitude)
        lowered = jnp.minimum(target, clip(scale * self.backoff_factor))
        loss_scale = jnp.where(new_state.applied, target, lowered)
        finite_steps = optax.safe_increment(state.growth_tracker)
        return new_state._replace(
            loss_scale=loss_scale,
            growth_tracker=jnp.where(new_state.applied, finite_steps, 0),
            rule_state=HeadroomState(magnitude),
        )


def _finite_magnitude(x: jax.typing.ArrayLike) -> jax.Array:
    """Return a magnitude as a finite float32, and NaN as 0, which is ignored."""
    x = jnp.asarray(x, jnp.float32)
    return jnp.where(jnp.isnan(x), 0, jnp.clip(x, 0, jnp.finfo(jnp.float32).max))
