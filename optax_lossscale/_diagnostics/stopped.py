"""Decide when training has stopped, and what to tell the user."""

from typing import Any

import jax
import numpy as np

from .._state import LossScaleState
from .report import GradientReport
from .table import format_report

_BAD_LOSS = """If it is NaN or inf, the scale is not the problem. Check the data and \
the parameters, or lower the learning rate."""
_BAD_UPDATES = """the optimizer turns finite gradients into NaN or inf, and \
`check_updates=True` skips these steps. The scale is not the problem. Clip the \
gradients, raise `eps`, keep the moments in float32, or wrap the optimizer of float16 \
parameters with `with_master_weights`."""
_ADVICE = f"""
Check the loss before it is scaled.
- {_BAD_LOSS}
- If it is finite and the scale is at its minimum, do the same.
- If it is finite and the scale is still falling, start from a lower scale.
- If it is finite and the scale is fixed, lower the scale. If it is 1 and blocks are \
wrapped with `scale_backward`, raise their `headroom`.
- If it is finite and the scale is above its minimum and has not fallen, {_BAD_UPDATES}
- If it is finite but multiplied by an earlier scale, the gradient function was built \
from an earlier state, and the compiled program holds that scale as a constant. Build \
it inside the step, from the state that is passed to the step."""
_ADVICE_WITHOUT_OVERFLOW = f"""
The scale has not fallen in these steps, so it is not the problem. Check the loss.
- {_BAD_LOSS}
- If it is finite, {_BAD_UPDATES}"""


def is_due(consecutive_skips: Any, limit: int, every: int = 1) -> Any:
    """Return whether to report: at the first skip beyond the limit, then every few."""
    beyond = consecutive_skips - limit
    return (beyond > 0) & ((beyond - 1) % every == 0)


def stop_message(
    scale_state: LossScaleState, limit: int, report: GradientReport | None
) -> str:
    """Return how many steps were skipped, the possible causes, and what to do."""
    numbers = jax.device_get(
        (
            scale_state.consecutive_skips,
            scale_state.skipped_steps,
            scale_state.loss_scale,
            scale_state.growth_tracker,
        )
    )
    # In an ensemble, the member that has skipped the most steps in a row.
    worst = np.unravel_index(np.argmax(numbers[0]), np.shape(numbers[0]))
    skips, skipped, scale, tracker = (np.asarray(x)[worst] for x in numbers)
    # Every rule resets its count of finite steps when gradients overflow.
    scale_stood_still = tracker > 0 or (report is not None and _is_finite(report))
    advice = _ADVICE_WITHOUT_OVERFLOW if scale_stood_still else _ADVICE
    member = f" of member {', '.join(map(str, worst))}" if worst else ""
    text = (
        f"The last {skips} steps{member} were all skipped, more than "
        f"`max_consecutive_skips`={limit}, and {skipped} in total. The loss scale is "
        f"{scale:g}.{advice}"
    )
    if report is not None:
        text += f"\nThe last gradients:\n{format_report(report, limit=5)}"
    return text


def _is_finite(report: GradientReport) -> bool:
    totals = jax.device_get(report.totals)
    return int(totals.nan) + int(totals.inf) == 0
