"""The messages of the guard: what has happened, the numbers, what to do, and a page."""

import enum
import textwrap
from typing import Any

import jax
import numpy as np

from .._state import LossScaleState
from .._validation import BOOK
from .table import ALL_KINDS, FINITE_KINDS, table_of

_NUMBERS = "Loss scale: {loss_scale:g}. Skipped in all: {skipped_steps}."
_FIND = (
    "`ls.nonfinite_report(train_step, params, opt_state, batch)` names the operations "
    "and lines that make NaN or inf. Call it with the arguments of a skipped step, "
    "outside of `jax.jit`."
)
_REPORT_PAGE = "troubleshooting.md#find-the-operation"
_SOME_PAGE = "troubleshooting.md#some-steps-are-skipped"


class Event(enum.Enum):
    """What the guard reports, in this order: the event, what to do, and the page.

    Every warning except the two about skips has caught a bug in a public program.
    """

    NEVER_OVERFLOWED = (
        "The loss scale is 2**24 or more. None of the steps was skipped.",
        "Either the step calls `jax.value_and_grad` instead of `ls.value_and_grad`, or "
        "nothing is computed in float16 (use `skip_nonfinite`), or all gradients are "
        "below 0.004, which is fine.",
        "troubleshooting.md#the-scale-climbs-to-the-ceiling",
    )
    OFTEN_SKIPPED = "More than 5% of the recent steps are skipped.", _FIND, _SOME_PAGE
    LONG_ROW = "More than 50 steps in a row were skipped.", _FIND, _REPORT_PAGE
    UPDATE_UNDONE = (
        "The gradients or the loss are not finite, but the step counts as applied.",
        "`update` must run in every step, with `value=loss` and with the gradients as "
        "they are, and the step must keep the state that it returns. `grads` must "
        "belong to this step.",
        "troubleshooting.md#the-update-is-left-out",
    )
    ALL_ZERO = (
        "All gradients are exactly 0.",
        "Either the loss does not reach the parameters (`stop_gradient`), or no label "
        "of the batch counts, or, in float16, a divisor is inf (a count or a norm) or "
        "all gradients underflow.",
        "troubleshooting.md#all-gradients-are-0",
    )
    INVALID_SCALE = (
        "The loss scale{member} is not a positive number.",
        "Your own rule returned it, or the state was set by hand or restored from a "
        "failed run. Set a scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`.",
        "guides/checkpoints.md#restored-scales-and-another-rule",
    )
    SKIPS_IN_A_ROW = (
        "The last {skips} skipped, more than `max_consecutive_skips`={limit}.",
        _FIND,
        _REPORT_PAGE,
    )
    HIGH_SKIP_RATE = (
        "Recently, {skip_rate:.0%} of the steps{member} were skipped.",
        _FIND,
        _SOME_PAGE,
    )

    def __init__(self, text: str, advice: str, page: str) -> None:
        self.text, self.advice, self.page = text, advice, page


ERRORS = Event.INVALID_SCALE, Event.SKIPS_IN_A_ROW, Event.HIGH_SKIP_RATE


def message(
    event: Event, limit: int, due: Any, state: LossScaleState, arrays: Any, value: Any
) -> str:
    """Return what has happened, what to do, the page, and for an error the arrays.

    ``arrays`` is a pair: a report of the gradients or None, and which leaves of the
    state are finite.
    """
    report, finite = arrays
    # In an ensemble, the first member for which the event is due.
    member = np.unravel_index(np.argmax(due), np.shape(due))
    named = f" of member {', '.join(map(str, member))}" if member else ""
    state = jax.tree.map(lambda x: np.asarray(x)[member], state._replace(rule_state=()))
    count = state.consecutive_skips
    skips = f"step{named} was" if count == 1 else f"{count} steps{named} were all"
    fields = {"limit": limit, "member": named, "skips": skips, **state._asdict()}
    is_error = event in ERRORS
    texts = [event.text, _NUMBERS] if is_error else [event.text]
    texts = [x.format(**fields) for x in texts]
    if is_error and value is not None:
        texts[-1] += f" The loss of this step: {float(value):g}."
    if is_error and (bad := [x for x, flags in finite.items() if not np.all(flags)]):
        bad[5:] = [f"{len(bad) - 5} more"] if len(bad) > 5 else []
        texts.append(f"Not finite in the optimizer state: {', '.join(bad)}.")
    wrapper = textwrap.TextWrapper(80, break_on_hyphens=False, break_long_words=False)
    texts = [*map(wrapper.fill, [*texts, event.advice]), f"{BOOK}{event.page}"]
    if is_error and report is not None:
        is_unscaled = bool(state.is_fixed) and state.loss_scale == 1
        kinds = FINITE_KINDS if is_unscaled else ALL_KINDS
        texts += ["The last gradients:", table_of(report, 5, kinds)]
    return "\n".join(texts)
