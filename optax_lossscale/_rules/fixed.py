"""The rule that never changes its scale."""

import dataclasses
from typing import final

import jax
import jax.numpy as jnp

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._state import LossScaleState, recorded
from .._validation import check_bool
from .arguments import check_fixed_scale, settle
from .base import LossScale, compiled
from .growth import float32
from .soundness import first_scale


@final
@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """Keep the scale constant.

    A restored scale is kept too. If it is NaN or has no normal reciprocal in float32,
    the next step sets it to ``loss_scale``, unless ``skip_nonfinite`` is False: then
    nothing is checked.

    The rule of TensorFlow's ``FixedLossScale`` (``skip_nonfinite=False``) and of
    MindSpore's ``FixedLossScaleManager``, whose ``drop_overflow_update`` is
    ``skip_nonfinite`` here. With ``FixedLossScale(1.0)`` nothing is scaled and only
    the skipping remains, which is what bfloat16 and float32 want.

    Args:
        loss_scale: the scale, from 1 to 2**126. A power of two makes scaling exact.
        skip_nonfinite: whether to skip steps whose gradients are not finite. If not,
            nothing is checked and nothing masked.

    Raises:
        ValueError: if an argument is out of range, as it is or rounded to float32.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.FixedLossScale(1024.0)
        >>> state = rule.update(rule.init(), False)
        >>> float(state.loss_scale), int(state.skipped_steps)
        (1024.0, 1)

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """

    loss_scale: float = 128.0
    skip_nonfinite: bool = True

    def __post_init__(self) -> None:
        settle(self, loss_scale=check_fixed_scale(self.loss_scale))
        check_bool(
            "skip_nonfinite",
            self.skip_nonfinite,
            "It decides how the step is built, so it cannot be an array.",
        )

    def init(self) -> LossScaleState:
        return LossScaleState.create(first_scale(self.loss_scale), hysteresis=-1)

    @compiled
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        if not self.skip_nonfinite:
            return state
        scale = state.loss_scale
        # A checkpoint may hold anything; zero or infinity would stay forever.
        sound = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
        (first,) = float32(self, "loss_scale")
        scale = jnp.where(sound, scale, first)
        return recorded(state, grads_finite)._replace(loss_scale=scale)
