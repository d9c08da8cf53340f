"""The messages of the guard: what has happened, likely causes, the page with a fix."""

import enum
import textwrap
from typing import Any, NamedTuple

import jax
import numpy as np

from .._state import MOST_COUNTED_SKIPS, LossScaleState
from .._validation import BOOK
from .table import ALL_KINDS, FINITE_KINDS, table_of


class Event(enum.Enum):
    """What the guard reports, in this order.

    Each warning but the two about skips has found a fault in a public program.
    """

    NEVER_OVERFLOWED = "The loss scale is 2**24 or more. None of the steps was skipped."
    OFTEN_SKIPPED = "More than 5% of the recent steps are skipped."
    LONG_ROW = "More than 50 steps in a row were skipped."
    UPDATE_UNDONE = (
        "The gradients or the loss are not finite, but the step counts as applied."
    )
    ALL_ZERO = "All gradients are exactly 0."
    INVALID_SCALE = "The loss scale{member} is not a positive number."
    SKIPS_IN_A_ROW = (
        "The last {skips} skipped, more than `max_consecutive_skips`={limit}."
    )
    HIGH_SKIP_RATE = "Recently, {skip_rate:.0%} of the steps{member} were skipped."


WARNINGS = (
    Event.NEVER_OVERFLOWED,
    Event.OFTEN_SKIPPED,
    Event.LONG_ROW,
    Event.UPDATE_UNDONE,
    Event.ALL_ZERO,
)


class _Causes(NamedTuple):
    """The likely causes of an event, and the page with the fix."""

    text: str
    page: str
    # If the scale is fixed at 1, as in bfloat16 and float32, neither the scale nor
    # float16 is a cause.
    unscaled: str = ""
    unscaled_page: str = "guides/nan_guard.md#why-a-step-is-skipped"


_DATA = "the batch, the parameters or a carried state contain NaN or inf"
_FORWARD = "an activation is above 65504 (`autocast_report` finds it)"
_DERIVATIVE = (
    "a derivative is infinite (`sqrt`, `x ** 0.5`, `log`, a norm or `arctan2` at 0, "
    "`std` of equal values, `eigh` with equal eigenvalues, `exp` before a clip)"
)
_STATE = "`value_and_grad` gets another state than `update`, or an earlier one"
_BACKWARD = f"{_STATE}; or one layer overflows in the backward pass"
_LABEL = "a label is out of range, or a mean over nothing is 0/0"
_NAN_LOSS = (
    "a label is out of range, such as -100, for which JAX reads NaN; a mask multiplies "
    "inf by 0; a mean over nothing is 0/0"
)
_DIVERGES = "training diverges (clip the gradients, or lower the learning rate)"
_SKIPS_ITSELF = "your program passes `value=nan` (early stopping, spikes)"
_MORE = "Pass `grads=grads` and `value=loss` to `check_loss_scale` to learn more"
_STOP_GRADIENT = "the loss does not reach the parameters (`stop_gradient`)"

# The causes of skips in a row depend on what is known about the loss and the gradients.
_LOSS_UNKNOWN = _Causes(
    f"{_DATA}; {_FORWARD}; {_STATE}; {_SKIPS_ITSELF}; or the gradients overflow. "
    f"{_MORE}",
    "troubleshooting.md#the-loss-is-nan-from-the-first-step",
    f"{_DATA}; {_LABEL}; {_DERIVATIVE}; {_SKIPS_ITSELF}; or {_DIVERGES}. {_MORE}",
)
_LOSS_NOT_FINITE = _Causes(
    f"{_DATA}; {_FORWARD}; or a mean over nothing is 0/0",
    "troubleshooting.md#the-loss-is-nan-from-the-first-step",
    f"{_DATA}; {_LABEL}; or {_DIVERGES}",
)
_ONLY_LOSS_NOT_FINITE = _Causes(
    f"{_NAN_LOSS}; or the loss itself is above 65504 in float16",
    "troubleshooting.md#a-label-out-of-range",
    f"{_NAN_LOSS}; or {_DIVERGES}",
)
# inf and NaN have the same causes: after a float16 matmul, an overflow may be
# inf - inf, which is NaN.
_GRADS_NOT_FINITE = _Causes(
    "the scale is too high, if it is fixed or still falling (`suggest_loss_scale` "
    f"returns a better one); {_DERIVATIVE}; {_BACKWARD}",
    "troubleshooting.md#the-scale-falls-to-1",
)
_GRADS_NOT_FINITE_AT_LOW_SCALE = _Causes(
    f"{_DERIVATIVE}; the gradients overflow even at this scale, as they can for a sum "
    f"instead of a mean or for large targets; {_BACKWARD}",
    "troubleshooting.md#the-scale-falls-to-1",
    f"{_DERIVATIVE}; or {_DIVERGES}",
)
_OPTIMIZER = (
    "with `check_updates=True`, the optimizer turns finite gradients into NaN or inf "
    "(its state or a learning rate is not finite, or it squares gradients above 1e19)"
)
_FLAG = "`grads_finite` is inverted: True means finite, unlike `found_inf` elsewhere"
_GRADS_FINITE = _Causes(
    f"the `value` that `update` got is not finite; {_SKIPS_ITSELF}; its {_FLAG}; or, "
    f"{_OPTIMIZER}",
    "guides/wrappers.md#skip-a-step-yourself",
)
_ALL_FINITE = _Causes(
    f"{_OPTIMIZER}; {_SKIPS_ITSELF}; or {_FLAG}",
    "start/guarantees.md#what-is-guaranteed",
)
_SOME_STEPS = _Causes(
    "some batches contain NaN, inf or no label; in the forward pass of some, "
    f"{_FORWARD}; or the scale grows too soon and overflows again (raise "
    "`growth_interval`)",
    "troubleshooting.md#some-steps-are-skipped",
    f"some batches contain NaN, inf or no label; {_DERIVATIVE}",
)

# The causes of skips in a row are above.
_CAUSES = {
    Event.NEVER_OVERFLOWED: _Causes(
        "the step calls `jax.value_and_grad` instead of `ls.value_and_grad`; nothing "
        "is computed in float16 (use `skip_nonfinite`); or all gradients are below "
        "0.004, which is fine",
        "troubleshooting.md#the-scale-climbs-to-the-ceiling",
    ),
    Event.OFTEN_SKIPPED: _SOME_STEPS,
    Event.UPDATE_UNDONE: _Causes(
        "`update` does not get `value=loss`; an `if` or `lax.cond` leaves `update` "
        "out; the step restores the old state; NaN is replaced before `update`, for "
        "example with `nan_to_num`; the rule never skips; or `grads` belong to another "
        "step",
        "troubleshooting.md#the-update-is-left-out",
    ),
    Event.ALL_ZERO: _Causes(
        f"{_STOP_GRADIENT}; no label of the batch counts; a divisor is inf in float16 "
        "(a count or a norm); or the scale is too low, so that all gradients underflow",
        "troubleshooting.md#all-gradients-are-0",
        f"{_STOP_GRADIENT}; no label of the batch counts; or the loss is computed in "
        "float16, which needs `with_loss_scaling` and `value_and_grad`",
        "troubleshooting.md#all-gradients-are-0",
    ),
    Event.INVALID_SCALE: _Causes(
        "your own rule returned it; or the state was set by hand or restored from a "
        "failed run (set a scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`)",
        "guides/checkpoints.md#restored-scales-and-another-rule",
    ),
    Event.HIGH_SKIP_RATE: _SOME_STEPS,
}
_NUMBERS = "Loss scale: {loss_scale:g}. Skipped in all: {skipped_steps}."


def message(
    event: Event, limit: int, due: Any, state: Any, arrays: Any, value: Any
) -> str:
    """Return what has happened, its causes, their page, and for an error the arrays.

    ``arrays`` is a pair: a report of the gradients or None, and which leaves of the
    state are finite.
    """
    report, finite = arrays
    # In an ensemble, the first member for which the event is due.
    member = np.unravel_index(np.argmax(due), np.shape(due))
    named = f" of member {', '.join(map(str, member))}" if member else ""
    state = jax.tree.map(lambda x: np.asarray(x)[member], state._replace(rule_state=()))
    is_row = state.consecutive_skips > MOST_COUNTED_SKIPS
    why = None if event is Event.HIGH_SKIP_RATE and is_row else _CAUSES.get(event)
    why = why or _causes_of_skips(state, report, value)
    skips = state.consecutive_skips
    skips = f"step{named} was" if skips == 1 else f"{skips} steps{named} were all"
    fields = {"limit": limit, "member": named, "skips": skips, **state._asdict()}
    is_unscaled = bool(state.is_fixed) and state.loss_scale == 1
    causes, page = why[2:] if is_unscaled and why.unscaled else why[:2]
    texts = [event.value] if event in WARNINGS else [event.value, _NUMBERS]
    texts = [*(x.format(**fields) for x in texts), f"Likely causes: {causes}."]
    wrapper = textwrap.TextWrapper(80, break_on_hyphens=False, break_long_words=False)
    bad = [name for name, flags in finite.items() if not np.all(flags)]
    if event not in WARNINGS and bad:
        bad[5:] = [f"{len(bad) - 5} more"] if len(bad) > 5 else []
        texts.append(f"Not finite in the optimizer state: {', '.join(bad)}.")
    texts = [*map(wrapper.fill, texts), f"{BOOK}{page}"]
    if event not in WARNINGS and report is not None:
        kinds = FINITE_KINDS if is_unscaled else ALL_KINDS
        texts += ["The last gradients:", table_of(report, 5, kinds)]
    return "\n".join(texts)


def _causes_of_skips(state: LossScaleState, report: Any, value: Any) -> _Causes:
    """Return the causes of skips in a row, as far as they are known."""
    grads_finite = report is not None and not any(
        map(float, jax.tree.leaves((report.nan, report.inf)))
    )
    if value is not None and not np.isfinite(float(value)):
        return _ONLY_LOSS_NOT_FINITE if grads_finite else _LOSS_NOT_FINITE
    if grads_finite:
        return _GRADS_FINITE if value is None else _ALL_FINITE
    if value is None:
        return _LOSS_UNKNOWN
    is_low = state.loss_scale <= 1
    return _GRADS_NOT_FINITE_AT_LOW_SCALE if is_low else _GRADS_NOT_FINITE
