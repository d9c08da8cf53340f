"""The rule that never changes its scale."""

import dataclasses
from typing import final

import jax

from .._state import LossScaleState
from .base import LossScale, check_fields, checked_state, compile_for_rule


@final
@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """Keep the loss scale constant.

    Use it if you know a scale that works; `suggest_loss_scale` returns one for given
    gradients. ``FixedLossScale(1.0)`` scales nothing and only skips non-finite steps.
    `skip_nonfinite` is a wrapper with this rule, for bfloat16 and float32.

    Args:
        loss_scale: the scale, from 1 to 2**126. Use a power of two: scaling is then
            exact.
        skip_nonfinite: whether to skip steps with non-finite gradients. If False,
            nothing is checked or masked, like in TensorFlow's ``FixedLossScale``.

    Raises:
        ValueError: if an argument is out of range or traced.

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
        check_fields(self)

    def init(self) -> LossScaleState:
        return LossScaleState.create(self.loss_scale, is_fixed=True)

    def update(
        self, state: LossScaleState, grads_finite: "jax.typing.ArrayLike"
    ) -> LossScaleState:
        return self._compiled(checked_state(self, state, grads_finite), grads_finite)

    @compile_for_rule
    def _compiled(
        self, state: LossScaleState, grads_finite: jax.Array
    ) -> LossScaleState:
        return state.record(grads_finite) if self.skip_nonfinite else state
