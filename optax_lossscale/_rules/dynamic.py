"""The rule that searches for the largest scale that does not overflow."""

import dataclasses
from typing import final

import jax

from .._state import LossScaleState
from .._validation import check_order
from .base import compiled
from .growth import GrowingLossScale, counted, moved


@final
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(GrowingLossScale):
    """Raise the scale while gradients stay finite, and lower it when they do not.

    This is the default rule. It finds a scale near the largest one that does not
    overflow, and adjusts it as the gradients change during training. A step is finite
    if all of its gradients are finite. After each step the rule does the following::

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

    ``hysteresis_refill`` decides when ``hysteresis_tracker`` is reset to
    ``hysteresis``:

    - ``"finite"``: after any finite step, as in Apex and in DeepSpeed with
      ``consecutive_hysteresis``.
    - ``"growth"``: only when the scale grows, as in Megatron-LM and DeepSpeed. Until
      then, every further non-finite step backs off.
    - ``"change"``: when the scale grows or backs off, as ``decr_every_n_nan_or_inf``
      in ``tf.contrib``. Non-finite steps are counted across finite ones.

    A scale restored from a checkpoint may be outside ``min_scale`` and ``max_scale``.
    It is clipped on the first step that leaves it unchanged. Growth never lowers the
    scale and backoff never raises it. A NaN scale is replaced by ``init_scale``.

    Args:
        init_scale: the first scale, from ``min_scale`` to ``max_scale``. The default is
            the largest power of two that float16 can represent.
        growth_factor: the factor by which the scale grows, more than 1. To stop the
            scale from ever growing, set ``max_scale=init_scale``.
        backoff_factor: the factor by which the scale backs off, between 0 and 1. To
            stop the scale from ever backing off, set ``min_scale=init_scale``.
        growth_interval: how many finite steps in a row raise the scale, 1 or more.
        min_scale: the smallest scale to back off to, from 2**-126. The bounds keep the
            scale and its reciprocal normal float32 numbers.
        max_scale: the largest scale to grow to, up to 2**126.
        hysteresis: how many non-finite steps it takes to back off, 1 or more.
        hysteresis_refill: what resets the hysteresis counter: ``"finite"``,
            ``"growth"`` or ``"change"``, as described above.

    Raises:
        ValueError: if an argument is out of range, before or after it is rounded to
            float32.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(
            min_scale=self.min_scale,
            init_scale=self.init_scale,
            max_scale=self.max_scale,
        )

    @compiled
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        new_state, change = counted(self, state, grads_finite)
        return new_state._replace(loss_scale=moved(self, state, change))
