"""Say what has happened, its likeliest causes, and where the way out is written."""

import functools
import textwrap
from typing import Any

import jax
import numpy as np

from .table import format_report

# The only place in the package that knows where the book is.
BOOK = "https://github.com/optax-lossscale/optax_lossscale/blob/main/notebooks/"

WARNINGS = {
    "never overflowed": "The loss scale is 2**24 or more. None of the steps was "
    "skipped.",
    "at the floor": "The scale has fallen to 1 or below, and more than 5 % of the "
    "steps are skipped.",
    "undone": "The gradients are not finite, but the step counts as applied.",
    "all zero": "All gradients are exactly 0.",
}
_ERRORS = {
    "invalid scale": "The loss scale{member} is not a positive number.",
    "skips in a row": "The last {consecutive_skips} steps{member} were all skipped, "
    "more than `max_consecutive_skips`={limit}.",
    "skips of late": "Recently, {skip_rate:.0%} of the steps{member} were skipped.",
}
EVENTS = WARNINGS | _ERRORS  # in the order in which they are told
_NUMBERS = "Loss scale: {loss_scale:g}. Skipped in all: {skipped_steps}."

_HELP = "troubleshooting.md#"
_DATA = "the batch, the parameters or a carried state hold NaN or inf"
_BATCHES = "some batches hold NaN, inf or no label"
_FORWARD = (
    "an activation is above 65504, the largest float16 (`autocast_report` finds it)"
)
_BACKWARD = (
    "a layer overflows in the backward pass (the report of `grads=grads` shows which: "
    "compute it in float32, or wrap it with `scale_block`)"
)
_DERIVATIVE = (
    "`sqrt`, a norm or `log` has an infinite derivative at 0, even in a branch that "
    "`jnp.where` does not take"
)
_EMPTY = "a mean over nothing is 0/0"
_OLD_STATE = "the gradient function was built once, from an earlier state"
_TOO_HIGH = (
    "the scale is too high, if it is fixed or still falling (`suggest_loss_scale` "
    "returns one)"
)
_TOO_LARGE = "the gradients overflow at any scale, as those of a sum do"
_SMALL = "the scale is fixed or still small, and all gradients underflow"

# The likeliest causes of each event, and the page that has the way out. Those of skips
# in a row depend on what is known of the loss and the gradients, see ``_known``.
_CAUSES = {
    "never overflowed": (
        "the step calls `jax.value_and_grad` instead of `ls.value_and_grad`",
        "nothing is computed in float16 (use `FixedLossScale(1.0)`)",
        "all gradients are below 0.004, and all is well",
        f"{_HELP}the-scale-climbs-to-the-ceiling",
    ),
    "at the floor": (_BATCHES, _FORWARD, _BACKWARD, f"{_HELP}the-scale-falls-to-1"),
    "undone": (
        "the step leaves `update` out, by an `if` or `lax.cond`, or puts the old state "
        "back",
        "NaN is replaced before `update`, as by `nan_to_num`",
        "`grads` are not those of this step",
        f"{_HELP}the-update-is-left-out",
    ),
    "all zero": (
        "the loss does not reach the parameters, as behind a `stop_gradient`",
        "the count that a mean divides by is inf in float16",
        _SMALL,
        f"{_HELP}all-gradients-are-0",
    ),
    "invalid scale": (
        "the state was restored from a run that had failed, or was set by hand (set a "
        "scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`)",
        "guides/checkpoints.md#restored-scales-and-another-rule",
    ),
    "skips of late": (
        _BATCHES,
        _FORWARD,
        "the scale grows too soon and overflows again (raise `growth_interval`)",
        f"{_HELP}every-second-step-is-skipped",
    ),
    "loss unknown": (
        _DATA,
        _FORWARD,
        "{scale}",
        f"{_HELP}the-loss-is-nan-from-the-first-step",
    ),
    "loss not finite": (
        _DATA,
        _FORWARD,
        _EMPTY,
        f"{_HELP}the-loss-is-nan-from-the-first-step",
    ),
    "loss not finite, gradients finite": (
        "a label is out of range, such as -100, for which JAX reads NaN",
        "a mask multiplies inf by 0 (select with `jnp.where`)",
        _DATA,
        f"{_HELP}a-label-out-of-range",
    ),
    "gradients inf": ("{scale}", _BACKWARD, _OLD_STATE, f"{_HELP}a-scale-below-1"),
    # Behind a float16 product, gradients that overflow are NaN, too: inf - inf.
    "gradients NaN": (
        _DERIVATIVE,
        "{scale}",
        _EMPTY,
        _BACKWARD,
        _OLD_STATE,
        f"{_HELP}nan-gradients-of-a-finite-loss",
    ),
    "gradients finite": (
        "with `check_updates=True`, the optimizer turns finite gradients into NaN or "
        "inf",
        "`grads_finite` is the wrong way round, as `found_inf` of other systems is",
        "start/guarantees.md#optimizers-that-overflow",
    ),
}


def message(
    event: str, limit: int, due: Any, state: Any, report: Any, value: Any
) -> str:
    """Return what has happened, its causes, their page, and for an error the report.

    Lines have up to 80 columns. An address is longer, so it gets a line of its own.
    """
    # In an ensemble, the first member for which the event is due.
    member = np.unravel_index(np.argmax(due), np.shape(due))
    named = f" of member {', '.join(map(str, member))}" if member else ""
    state = state._replace(rule_state=())
    state = jax.tree.map(lambda x: np.asarray(x)[member], state)
    *causes, page = _CAUSES.get(event) or _CAUSES[_known(report, value)]
    scale = _TOO_LARGE if state.loss_scale <= 1 else _TOO_HIGH
    likely = f"Likely causes: {'; '.join(causes)}."
    texts = [EVENTS[event], *[_NUMBERS] * (event in _ERRORS), likely]
    fields = {"limit": limit, "member": named, "scale": scale, **state._asdict()}
    fill = functools.partial(
        textwrap.fill, width=80, break_on_hyphens=False, break_long_words=False
    )
    texts = [*(fill(text.format(**fields)) for text in texts), f"{BOOK}{page}"]
    if event in _ERRORS and report is not None:
        texts += ["The last gradients:", format_report(report, limit=5)]
    return "\n".join(texts)


def _known(report: Any, value: Any) -> str:
    """Return what is known of the loss and the gradients of skipped steps."""
    bad_loss = value is not None and not np.isfinite(float(value))
    if report is None:
        unknown = "loss unknown" if value is None else "gradients inf"
        return "loss not finite" if bad_loss else unknown
    nan, inf = (any(map(float, jax.tree.leaves(x))) for x in (report.nan, report.inf))
    if bad_loss:
        return "loss not finite" if nan or inf else "loss not finite, gradients finite"
    if nan:
        return "loss unknown" if value is None else "gradients NaN"
    return "gradients inf" if inf else "gradients finite"
