"""Say what has happened, its likeliest causes, and where the way out is written."""

import enum
import functools
import textwrap
from typing import Any

import jax
import numpy as np

from .._validation import BOOK
from .table import ALL_KINDS, FINITE_KINDS, table_of


class Event(enum.Enum):
    """What the guard tells, in this order, and the text of each."""

    NEVER_OVERFLOWED = "The loss scale is 2**24 or more. None of the steps was skipped."
    OFTEN_SKIPPED = "More than 5 % of the recent steps are skipped."
    UPDATE_UNDONE = "The gradients are not finite, but the step counts as applied."
    ALL_ZERO = "All gradients are exactly 0."
    INVALID_SCALE = "The loss scale{member} is not a positive number."
    SKIPS_IN_A_ROW = (
        "The last {skips} skipped, more than `max_consecutive_skips`={limit}."
    )
    HIGH_SKIP_RATE = "Recently, {skip_rate:.0%} of the steps{member} were skipped."


WARNINGS = {
    Event.NEVER_OVERFLOWED,
    Event.OFTEN_SKIPPED,
    Event.UPDATE_UNDONE,
    Event.ALL_ZERO,
}
_Causes = dict[Event | str, tuple[str, str]]
_NUMBERS = "Loss scale: {loss_scale:g}. Skipped in all: {skipped_steps}."

_DATA = "the batch, the parameters or a carried state hold NaN or inf"
_FORWARD = "an activation is above 65504 (`autocast_report` finds it)"
_DERIVATIVE = "`sqrt`, a norm or `log` has an infinite derivative at 0"
_BACKWARD = (
    "the gradient function was built once, from an earlier state; or one layer "
    "overflows in the backward pass"
)
_SOME_STEPS = (
    f"some batches hold NaN, inf or no label; in the forward pass of some, {_FORWARD}; "
    "or the scale grows too soon and overflows again (raise `growth_interval`)",
    "troubleshooting.md#some-steps-are-skipped",
)
# The likeliest causes of each event, and the page that has the way out. Those of skips
# in a row depend on what is known of the loss, the gradients and the scale.
_CAUSES: _Causes = {
    Event.NEVER_OVERFLOWED: (
        "the step calls `jax.value_and_grad` instead of `ls.value_and_grad`; nothing "
        "is computed in float16 (use `skip_nonfinite`); or all gradients are below "
        "0.004, and all is well",
        "troubleshooting.md#the-scale-climbs-to-the-ceiling",
    ),
    Event.OFTEN_SKIPPED: _SOME_STEPS,
    Event.UPDATE_UNDONE: (
        "the step leaves `update` out, by an `if` or `lax.cond`, or puts the old state "
        "back; NaN is replaced before `update`, as by `nan_to_num`; or `grads` are not "
        "those of this step",
        "troubleshooting.md#the-update-is-left-out",
    ),
    Event.ALL_ZERO: (
        "the loss does not reach the parameters, as behind a `stop_gradient`; no label "
        "of the batch counts; the count that a mean divides by is inf in float16; or "
        "the scale is too low, and all gradients underflow",
        "troubleshooting.md#all-gradients-are-0",
    ),
    Event.INVALID_SCALE: (
        "the state was restored from a run that had failed, or was set by hand (set a "
        "scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`)",
        "guides/checkpoints.md#restored-scales-and-another-rule",
    ),
    Event.HIGH_SKIP_RATE: _SOME_STEPS,
    "loss unknown": (
        f"{_DATA}; {_FORWARD}; or the gradients overflow. Pass `grads=grads` and "
        "`value=loss` to `check_loss_scale` to learn more",
        "troubleshooting.md#the-loss-is-nan-from-the-first-step",
    ),
    "loss not finite": (
        f"{_DATA}; {_FORWARD}; or a mean over nothing is 0/0",
        "troubleshooting.md#the-loss-is-nan-from-the-first-step",
    ),
    "loss not finite, gradients finite": (
        "a label is out of range, such as -100, for which JAX reads NaN; a mask "
        "multiplies inf by 0; a mean over nothing is 0/0; or the loss itself is above "
        "65504 in float16",
        "troubleshooting.md#a-label-out-of-range",
    ),
    # Those of inf and of NaN are the same: behind a float16 product, an overflow may be
    # inf - inf, which is NaN.
    "gradients not finite": (
        "the scale is too high, if it is fixed or still falling (`suggest_loss_scale` "
        f"returns a better one); {_DERIVATIVE}; {_BACKWARD}",
        "troubleshooting.md#the-scale-falls-to-1",
    ),
    "gradients not finite, scale low": (
        f"{_DERIVATIVE}; the gradients overflow at this scale and above, as those of a "
        f"sum or of large targets do; {_BACKWARD}",
        "troubleshooting.md#the-scale-falls-to-1",
    ),
    "gradients finite": (
        "the `value` that `update` got is not finite; its `grads_finite` is the wrong "
        "way round, as `found_inf` of other systems is; or, with `check_updates=True`, "
        "the optimizer turns finite gradients into NaN or inf",
        "guides/wrappers.md#what-else-can-skip-a-step",
    ),
}

_LABEL = "a label is out of range, or a mean over nothing is 0/0"
_DIVERGES = "training diverges (clip the gradients, or lower the learning rate)"
_GUARD = "guides/nan_guard.md#why-a-step-is-skipped"
_SOME_UNSCALED = (f"some batches hold NaN, inf or no label; {_DERIVATIVE}", _GUARD)
# The same where the scale is fixed at 1, as in bfloat16 and float32: no scale and no
# float16 is to blame.
_UNSCALED_CAUSES: _Causes = {
    Event.OFTEN_SKIPPED: _SOME_UNSCALED,
    Event.ALL_ZERO: (
        "the loss does not reach the parameters, as behind a `stop_gradient`; or no "
        "label of the batch counts",
        "troubleshooting.md#all-gradients-are-0",
    ),
    Event.HIGH_SKIP_RATE: _SOME_UNSCALED,
    "loss unknown": (
        f"{_DATA}; {_LABEL}; {_DERIVATIVE}; or {_DIVERGES}. Pass `grads=grads` and "
        "`value=loss` to `check_loss_scale` to learn more",
        _GUARD,
    ),
    "loss not finite": (f"{_DATA}; {_LABEL}; or {_DIVERGES}", _GUARD),
    "loss not finite, gradients finite": (
        "a label is out of range, such as -100, for which JAX reads NaN; a mask "
        f"multiplies inf by 0; a mean over nothing is 0/0; or {_DIVERGES}",
        _GUARD,
    ),
    "gradients not finite, scale low": (f"{_DERIVATIVE}; or {_DIVERGES}", _GUARD),
}


def message(
    event: Event, limit: int, due: Any, state: Any, report: Any, value: Any
) -> str:
    """Return what has happened, its causes, their page, and for an error the report.

    Lines have up to 80 columns. An address is longer, so it gets a line of its own.
    """
    # In an ensemble, the first member for which the event is due.
    member = np.unravel_index(np.argmax(due), np.shape(due))
    named = f" of member {', '.join(map(str, member))}" if member else ""
    state = jax.tree.map(lambda x: np.asarray(x)[member], state._replace(rule_state=()))
    is_row = event is Event.SKIPS_IN_A_ROW
    known = _known(state, report, value) if is_row else event
    is_unscaled = bool(state.is_fixed) and state.loss_scale == 1
    causes, page = (_CAUSES | _UNSCALED_CAUSES if is_unscaled else _CAUSES)[known]
    is_error = event not in WARNINGS
    texts = [event.value, *[_NUMBERS] * is_error]
    skips = state.consecutive_skips
    skips = f"step{named} was" if skips == 1 else f"{skips} steps{named} were all"
    fields = {"limit": limit, "member": named, "skips": skips, **state._asdict()}
    texts = [*(text.format(**fields) for text in texts), f"Likely causes: {causes}."]
    fill = functools.partial(
        textwrap.fill, width=80, break_on_hyphens=False, break_long_words=False
    )
    texts = [*map(fill, texts), f"{BOOK}{page}"]
    if is_error and report is not None:
        kinds = FINITE_KINDS if is_unscaled else ALL_KINDS
        texts += ["The last gradients:", table_of(report, 5, kinds)]
    return "\n".join(texts)


def _known(state: Any, report: Any, value: Any) -> str:
    """Return what is known of skipped steps."""
    grads_finite = report is not None and not any(
        map(float, jax.tree.leaves((report.nan, report.inf)))
    )
    if value is not None and not np.isfinite(float(value)):
        return (
            "loss not finite, gradients finite" if grads_finite else "loss not finite"
        )
    if grads_finite:
        return "gradients finite"
    if value is None:
        return "loss unknown"
    is_low = state.loss_scale <= 1
    return "gradients not finite, scale low" if is_low else "gradients not finite"
