"""Say that training has stopped, and what to do."""

import jax
import numpy as np

from .._state import LossScaleState
from .gradient_report import GradientReport, exact_totals
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


def stop_message(
    scale_state: LossScaleState, limit: int, report: GradientReport | None
) -> str:
    """Return how many steps were skipped, the possible causes, and what to do."""
    state = jax.device_get(scale_state._replace(rule_state=()))
    # In an ensemble, the member that has skipped the most steps in a row.
    skips = np.asarray(state.consecutive_skips)
    worst = np.unravel_index(np.argmax(skips), skips.shape)
    state = jax.tree.map(lambda x: np.asarray(x)[worst], state)
    # Every rule resets its count of finite steps when gradients overflow.
    overflowed = state.growth_tracker <= 0
    table = ""
    if report is not None:
        totals = exact_totals(report)
        overflowed &= totals.nan + totals.inf > 0
        table = f"\nThe last gradients:\n{format_report(report, limit=5)}"
    member = f" of member {', '.join(map(str, worst))}" if worst else ""
    return (
        f"The last {state.consecutive_skips} steps{member} were all skipped, more than "
        f"`max_consecutive_skips`={limit}, and {state.skipped_steps} in total. The "
        f"loss scale is {state.loss_scale:g}."
        f"{_ADVICE if overflowed else _ADVICE_WITHOUT_OVERFLOW}{table}"
    )
