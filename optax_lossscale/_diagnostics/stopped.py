"""When training has stopped, and what to say then."""

from typing import Any

import jax
import numpy as np

from .._state import LossScaleState
from .report import GradientReport
from .table import format_report

_FINITE_GRADIENTS = """the optimizer makes NaN or infinity of finite gradients, which \
`check_updates=True` skips. No scale cures that: clip the gradients, raise `eps`, keep \
moments in float32 and float16 parameters in `with_master_weights`."""
_ADVICE = f"""
Look at the loss before it is scaled.
- It is NaN or infinite: no scale cures that. Look at the data and the parameters, or \
lower the learning rate.
- It is finite, and the scale is at its floor: the same.
- It is finite, and the scale is still falling: start from a lower one.
- It is finite, and the scale is fixed: lower it, or if it is 1 and blocks are wrapped \
with `scale_backward`, raise their `headroom`.
- It is finite, and the scale is above its floor and has not fallen: \
{_FINITE_GRADIENTS}
- It is finite, but multiplied by an earlier scale: the gradient function was built \
from an earlier state, and its program holds that scale as a constant. Build it inside \
of the step, from the state that the step is passed."""
_ADVICE_WITHOUT_OVERFLOW = f"""
The scale has not fallen in these steps: it is not the cause. Look at the loss.
- It is NaN or infinite: no scale cures that. Look at the data and the parameters, or \
lower the learning rate.
- It is finite: {_FINITE_GRADIENTS}"""


def is_due(consecutive_skips: Any, limit: int, every: int = 1) -> Any:
    """Return whether to speak: at the first skip too many, and once every so many."""
    beyond = consecutive_skips - limit
    return (beyond > 0) & ((beyond - 1) % every == 0)


def stop_message(
    scale_state: LossScaleState, limit: int, report: GradientReport | None
) -> str:
    """Say how long nothing has been applied, and what may be the cause."""
    numbers = jax.device_get(
        (
            scale_state.consecutive_skips,
            scale_state.skipped_steps,
            scale_state.loss_scale,
            scale_state.growth_tracker,
        )
    )
    # Of an ensemble, the member that stands still for longest.
    worst = np.unravel_index(np.argmax(numbers[0]), np.shape(numbers[0]))
    skips, skipped, scale, tracker = (np.asarray(x)[worst] for x in numbers)
    # An overflow makes every rule forget the finite steps that it has counted.
    scale_stood_still = tracker > 0 or (report is not None and _is_finite(report))
    advice = _ADVICE_WITHOUT_OVERFLOW if scale_stood_still else _ADVICE
    member = f" of member {', '.join(map(str, worst))}" if worst else ""
    text = (
        f"The last {skips} steps{member} were all skipped, more than "
        f"`max_consecutive_skips`={limit}, and {skipped} in all. The loss scale is "
        f"{scale:g}.{advice}"
    )
    if report is not None:
        text += f"\nThe last gradients:\n{format_report(report, limit=5)}"
    return text


def _is_finite(report: GradientReport) -> bool:
    totals = jax.device_get(report.totals)
    return int(totals.nan) + int(totals.inf) == 0
