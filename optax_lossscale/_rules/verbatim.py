"""The rule that reproduces other systems' dynamic scales, quirks included."""

import dataclasses
from typing import final

import jax
import jax.numpy as jnp

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from .._state import LossScaleState
from . import fields
from .base import check_and_compile, check_fields
from .dynamic import GrowingLossScale, count_step
from .fields import make_field


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerbatimLossScale(GrowingLossScale):
    """Change the scale as another system does, quirks included.

    Presets return this rule when `DynamicLossScale` would not reproduce the scales of
    the system that they are named after. For a new run, use `DynamicLossScale`.

    ``init_scale`` may be outside the limits. Growth then lowers the scale to
    ``max_scale``, and backoff *raises* it to ``min_scale``. The arguments not listed
    here are those of `DynamicLossScale`.

    Args:
        first_growth_late: whether the first growth after the start or after a
            non-finite step takes one more finite step, as in DeepSpeed since 2025.

    Raises:
        ValueError: if an argument is out of range or traced.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.VerbatimLossScale(growth_interval=2, first_growth_late=True)
        >>> state, scales = rule.init(), []
        >>> for _ in range(5):
        ...     state = rule.update(state, True)
        ...     scales.append(float(state.loss_scale))
        >>> scales
        [32768.0, 32768.0, 65536.0, 65536.0, 131072.0]
    """

    min_scale: float = make_field(SMALLEST_SCALE, fields.scale)
    max_scale: float = make_field(LARGEST_SCALE, fields.scale)
    first_growth_late: bool = make_field(False, fields.first_growth_late)

    def __post_init__(self) -> None:
        check_fields(self, "min_scale", "max_scale")

    def init(self) -> LossScaleState:
        restart = jnp.int32(-self.first_growth_late)
        return super().init()._replace(growth_tracker=restart)

    @check_and_compile
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        new_state, change = count_step(
            self, state, grads_finite, -self.first_growth_late
        )
        # The first scale may be outside the limits.
        scale = state.loss_scale
        higher = jnp.minimum(scale * self.growth_factor, self.max_scale)
        lower = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        scale = jnp.where(change.backs_off, lower, scale)
        scale = jnp.where(change.grows, higher, scale)
        loss_scale = jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
        return new_state._replace(loss_scale=loss_scale)
