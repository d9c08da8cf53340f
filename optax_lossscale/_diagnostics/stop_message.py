"""Say what has happened, its likeliest causes, and the way out of each."""

import functools
import textwrap
from typing import Any

import jax
import numpy as np

from .table import GradientReport, format_report

# The only place in the package that knows where the book is.
_BOOK = "https://github.com/optax-lossscale/optax_lossscale/blob/main/notebooks/"

_FORWARD = f"""The forward pass overflows: an activation is above 65504, the largest \
float16, so the loss is NaN or inf. No loss scale helps. Find the block, and compute \
it in float32. {_BOOK}troubleshooting.md#an-activation-above-65504"""
_LAYER = f"""The backward pass overflows or divides by zero, in the layer of the array \
with NaN or inf that is closest to the loss, or right behind it. Compute that in \
float32, or wrap it with `scale_block`. {_BOOK}finding_the_overflow.ipynb"""
_DERIVATIVE = f"""The derivative of `sqrt`, a norm or `log` is NaN or inf at 0, in \
float32, too, and in the branch that `jnp.where` does not take. Keep 0 out of it: \
`sqrt(where(x > 0, x, 1))`. {_BOOK}troubleshooting.md#nan-gradients-of-a-finite-loss"""
_EMPTY = f"""A mean over nothing, as for a batch without one label, is 0/0. Divide by \
`jnp.maximum(count, 1)`. {_BOOK}troubleshooting.md#a-mean-over-nothing"""
_FLOOR = f"""The gradients overflow at any scale from 1, as those of a sum over many \
rows do. Return the mean, or use `DynamicLossScale(min_scale=2.0**-20)`. \
{_BOOK}troubleshooting.md#a-scale-below-1"""
_DATA = f"""The batch or the parameters hold NaN or inf. Check both with `all_finite`: \
the loss may be finite all the same. If training has diverged, lower the learning \
rate. {_BOOK}troubleshooting.md#the-loss-is-nan-from-the-first-step"""
_BATCHES = f"""Some batches hold NaN or inf, or not one label. Find them, and pass \
`value=jnp.where(all_finite(batch), loss, jnp.nan)` to `update`, so that they do not \
lower the scale. {_BOOK}troubleshooting.md#the-scale-falls-to-1"""
_INTERVAL = f"""The scale grows too soon and overflows again. Raise `growth_interval`. \
{_BOOK}troubleshooting.md#every-second-step-is-skipped"""
_TOO_HIGH = f"""The scale is too high, and is fixed or still falling. Start from what \
`suggest_loss_scale` returns. {_BOOK}troubleshooting.md#the-first-scale"""
_OLD_STATE = f"""The gradient function was built once, from an earlier state. Build it \
in the step. {_BOOK}start/guarantees.md#call-it-inside-the-compiled-function"""
_OUTSIDE = f"""A transformation outside `with_loss_scaling`, such as `MultiSteps`, \
keeps a NaN. Put `with_loss_scaling` around it. {_BOOK}guides/wrappers.md"""
_RESULTS = f"""If you use `check_updates=True`: the optimizer turns finite gradients \
into NaN or inf. Clip the gradients, raise `eps`, or use `with_master_weights`. \
{_BOOK}start/guarantees.md#optimizers-that-overflow"""
_RESTORED = f"""The state was restored from a run that had failed, or was set by hand. \
Set a scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`. \
{_BOOK}start/rules.md#restored-scales-and-another-rule"""
_NOT_SCALED = f"""The loss is not scaled. Call `value_and_grad` of this package, not \
JAX's. {_BOOK}troubleshooting.md#the-scale-climbs-to-the-ceiling"""
_NOT_FLOAT16 = f"""Nothing is computed in float16: use `FixedLossScale(1.0)`. Or all \
gradients are below 0.004, and all is well. {_BOOK}start/do_i_need_it.md"""
_HIDDEN = f"""A wrapper outside hides overflows from the rule. Put `with_loss_scaling` \
around it. {_BOOK}guides/trainers.md#levanter"""
_UNDONE = f"""The step leaves `update` out (`if`, `lax.cond`), or puts back the old \
optimizer state, as steps with Flax's `DynamicScale` do. So the scale never falls. \
Remove that. {_BOOK}troubleshooting.md#the-update-is-left-out"""
_OTHERS = f"""`grads` are of another step or of frozen parameters. Pass what `update` \
got in this one. {_BOOK}troubleshooting.md#the-update-is-left-out"""

# The causes of what has happened, or of skipped steps by what is known of their loss
# and gradients, the likeliest first.
_CAUSES = {
    "unused": (_NOT_SCALED, _NOT_FLOAT16, _HIDDEN),
    "undone": (_UNDONE, _HIDDEN, _OTHERS),
    "losing": (_BATCHES, _FORWARD, _LAYER),
    "often": (_BATCHES, _FORWARD, _INTERVAL),
    "wrong": (_RESTORED,),
    "nothing": (_DATA, _FORWARD, _FLOOR, _TOO_HIGH, _RESULTS),
    "bad loss": (_DATA, _FORWARD, _EMPTY),
    "inf": (_FLOOR, _TOO_HIGH, _LAYER, _DERIVATIVE),
    "some": (_DATA, _LAYER, _TOO_HIGH, _DERIVATIVE),
    "all": (_DATA, _FORWARD, _TOO_HIGH, _DERIVATIVE),
    "all, good loss": (_TOO_HIGH, _DERIVATIVE, _EMPTY, _OLD_STATE, _DATA),
    "none, scale kept": (_RESULTS, _OLD_STATE, _OUTSIDE, _DATA),
    "none": (_OLD_STATE, _OUTSIDE, _RESULTS),
}
_WARNINGS = {
    "unused": "The loss scale is 2**24 or more. None of the steps was skipped.",
    "losing": "The scale has fallen to 1, and more than 5 % of the steps are skipped.",
    "first": "The first skips are 20 in a row, and the scale has fallen to 1.",
    "undone": "The gradients are not finite, but the step counts as applied.",
}
EVENTS = (*_WARNINGS, "stopped")  # in the order in which they are told


def listed(what: list[str], causes: list[str]) -> str:
    """Return what happened and the numbered causes, in lines of up to 80 columns.

    An address is longer, so it gets a line of its own.
    """
    numbered = [f"{i}. {cause}" for i, cause in enumerate(causes, start=1)]
    fill = functools.partial(
        textwrap.fill, width=80, break_on_hyphens=False, break_long_words=False
    )
    filled = [*map(fill, what), *(fill(x, subsequent_indent="   ") for x in numbered)]
    return "\n".join(filled)


def message(event: str, limit: int, state: Any, report: Any, value: Any) -> str:
    """Return what has happened, at most three causes, and for an error the report."""
    state = jax.device_get(state._replace(rule_state=()))
    in_a_row = bool(np.any(state.consecutive_skips > limit))
    # In an ensemble, the member that has skipped the most steps.
    skips = np.asarray(state.consecutive_skips if in_a_row else state.skip_rate)
    wrong = ~((state.loss_scale > 0) & (state.loss_scale < np.inf))
    skips = np.where(np.any(wrong), wrong, skips)
    worst = np.unravel_index(np.argmax(skips), skips.shape)
    state = jax.tree.map(lambda x: np.asarray(x)[worst], state)
    if event in _WARNINGS:
        return listed([_WARNINGS[event]], _causes(event, state, report, value))
    member = f" of member {', '.join(map(str, worst))}" if worst else ""
    if not 0 < state.loss_scale < np.inf:
        event, what = "wrong", f"The loss scale{member} is not a positive number."
    elif in_a_row:
        what = f"The last {state.consecutive_skips} steps{member} were all skipped, "
        what += f"more than `max_consecutive_skips`={limit}."
    else:
        event = "often"
        what = f"Of late, {state.skip_rate:.0%} of the steps{member} were skipped."
    so_far = f"Loss scale: {state.loss_scale:g}. Skipped in all: {state.skipped_steps}."
    so_far += "" if value is None else f" Loss: {float(value):g}."
    text = listed([what, so_far], _causes(event, state, report, value))
    if report is not None:
        text += f"\nThe last gradients:\n{format_report(report, limit=5)}"
    return text


def _causes(event: str, state: Any, report: Any, value: Any) -> list[str]:
    """Return the likeliest causes that fit the state."""
    fixed, scale = state.is_fixed, state.loss_scale
    counted = state.growth_tracker > 0  # an overflow resets it
    # Had the scale been halved in each of these steps, it would be lower.
    high = scale > 1 and np.log2(scale) + state.consecutive_skips > 126
    fits = {
        _FLOOR: 2.0**-20 < scale <= 1,
        _TOO_HIGH: scale > 1 and not counted and (fixed or not high),
        _OLD_STATE: not (fixed or counted),
    }
    known = _known(report, value, fixed or counted or high)
    at_floor = report and known == "inf" and event in ("losing", "often")
    if event in _CAUSES and not at_floor:
        known = event
    return [cause for cause in _CAUSES[known] if fits.get(cause, True)][:3]


def _known(report: GradientReport | None, value: Any, kept: bool) -> str:
    """Return which arrays of the gradients are not finite, and whether the loss is."""
    if value is not None and not np.isfinite(float(value)):
        return "bad loss"
    if report is None:
        return "nothing" if value is None else "inf"
    fields = (report.nan, report.inf, report.size)
    nan, inf, size = map(np.array, map(jax.tree.leaves, jax.device_get(fields)))
    bad = (nan + inf)[size > 0] > 0
    if not bad.any():
        return "none, scale kept" if kept else "none"
    if not nan.any():
        return "inf"
    if bad.mean() <= 0.9:
        return "some"
    return "all" if value is None else "all, good loss"
