"""Say what has happened, its likeliest causes, and the way out of each."""

import functools
import textwrap

import jax
import numpy as np

from .._state import LossScaleState
from .table import GradientReport, format_report

# The only place in the package that knows where the book is.
_BOOK = "https://github.com/optax-lossscale/optax_lossscale/blob/main/notebooks/"

_FORWARD = f"""The forward pass overflows: an activation is above 65504, the largest \
float16, so the loss and nearly all gradients are NaN or inf. No loss scale helps. \
Find the block, and compute it in float32. \
{_BOOK}troubleshooting.md#an-activation-above-65504"""
_LAYER = f"""The backward pass overflows or divides by zero. Of the arrays with NaN or \
inf, take the one closest to the loss: the fault is in its layer or right behind it. \
Compute that in float32, or wrap it with `scale_block`. \
{_BOOK}finding_the_overflow.ipynb"""
_DATA = f"""The batch or the parameters hold NaN or inf. Check both with `all_finite`: \
the loss may be finite all the same. If training has diverged, lower the learning \
rate. {_BOOK}troubleshooting.md#the-loss-is-nan-from-the-first-step"""
_BATCHES = f"""Some batches hold NaN or inf. Find them with `all_finite(batch)`. If \
you do not yet, pass `value=jnp.where(all_finite(batch), loss, jnp.nan)` to `update`, \
so that they do not lower the scale. \
{_BOOK}troubleshooting.md#the-scale-falls-to-1"""
_INTERVAL = f"""The scale grows too soon and overflows again. Raise `growth_interval`. \
{_BOOK}troubleshooting.md#every-second-step-is-skipped"""
_TOO_HIGH = f"""The scale is too high, and is fixed or still falling. Start from what \
`suggest_loss_scale` returns. {_BOOK}troubleshooting.md#the-first-scale"""
_OLD_STATE = f"""The gradient function was built once, from an earlier state. Call \
`value_and_grad(loss_fn, opt_state)` in the step, with the step's state. \
{_BOOK}start/guarantees.md#call-it-inside-the-compiled-function"""
_OUTSIDE = f"""A transformation outside `with_loss_scaling`, such as `MultiSteps`, \
keeps a NaN. Put `with_loss_scaling` around it. {_BOOK}guides/wrappers.md"""
_RESULTS = f"""If you use `check_updates=True`: the optimizer turns finite gradients \
into NaN or inf. Clip the gradients, raise `eps`, or use `with_master_weights`. \
{_BOOK}start/guarantees.md#optimizers-that-overflow"""
_RESTORED = f"""The state was restored from a run that had failed, or was set by hand. \
Set a scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`. \
{_BOOK}start/rules.md#restored-scales-and-another-rule"""
_NOT_SCALED = f"""The loss is not scaled: the step calls `jax.value_and_grad`. Call \
`value_and_grad(loss_fn, opt_state)` of this package. \
{_BOOK}troubleshooting.md#the-scale-climbs-to-the-ceiling"""
_NOT_FLOAT16 = f"""Nothing is computed in float16. Then `FixedLossScale(1.0)` is \
enough. {_BOOK}start/do_i_need_it.md"""
_HIDDEN = f"""A wrapper outside `with_loss_scaling` leaves out the steps that \
overflow, so that the rule never sees them. Put `with_loss_scaling` around it. \
{_BOOK}guides/trainers.md#levanter"""
_SMALL = "All gradients are below 0.004. Then all is well."


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


_CEILING_MESSAGE = listed(
    ["The loss scale is 2**24 or more, and has been for 500 steps. None was skipped."],
    [_NOT_SCALED, _NOT_FLOAT16, _SMALL, _HIDDEN],
)
_LOSING_MESSAGE = listed(
    ["The loss scale has fallen to 1, and more than 5 % of the steps are skipped."],
    [_BATCHES, _FORWARD, _LAYER],
)
_FIRST_MESSAGE = listed(
    ["The first skips are 20 in a row, and the scale has fallen to 1. No scale helps."],
    [_DATA, _FORWARD, _LAYER],
)
# What `check_loss_scale` warns of.
WARNINGS = (_CEILING_MESSAGE, _LOSING_MESSAGE, _FIRST_MESSAGE)


def stop_message(
    scale_state: LossScaleState, limit: int, report: GradientReport | None
) -> str:
    """Return what has happened, at most three causes, and the report."""
    state = jax.device_get(scale_state._replace(rule_state=()))
    in_a_row = bool(np.any(state.consecutive_skips > limit))
    # In an ensemble, the member that has skipped the most steps.
    skips = np.asarray(state.consecutive_skips if in_a_row else state.skip_rate)
    wrong = ~((state.loss_scale > 0) & (state.loss_scale < np.inf))
    skips = np.where(np.any(wrong), wrong, skips)
    worst = np.unravel_index(np.argmax(skips), skips.shape)
    state = jax.tree.map(lambda x: np.asarray(x)[worst], state)
    member = f" of member {', '.join(map(str, worst))}" if worst else ""
    what = f"Of late, {state.skip_rate:.0%} of the steps{member} were skipped."
    if in_a_row:
        what = f"The last {state.consecutive_skips} steps{member} were all skipped, "
        what += f"more than `max_consecutive_skips`={limit}."
    so_far = f"Loss scale: {state.loss_scale:g}. Skipped in all: {state.skipped_steps}."
    causes = _causes(state, report) if in_a_row else [_BATCHES, _FORWARD, _INTERVAL]
    if not 0 < state.loss_scale < np.inf:
        what = f"The loss scale{member} is not a positive number."
        causes = [_RESTORED]
    message = listed([what, so_far], causes)
    if report is not None:
        message += f"\nThe last gradients:\n{format_report(report, limit=5)}"
    return message


def _causes(state: LossScaleState, report: GradientReport | None) -> list[str]:
    """Return the likeliest causes of a run of skipped steps."""
    fixed, scale = state.hysteresis_tracker < 0, state.loss_scale
    finite = state.growth_tracker > 0  # an overflow resets it
    # Had the scale been halved in each of these steps, it would be lower.
    high = scale > 1 and np.log2(scale) + state.consecutive_skips > 126
    kept = fixed or finite or high
    bad = np.ones(1) if report is None else _nonfinite(report)
    if not bad.any():
        others = [_OUTSIDE, _DATA] if fixed or finite else [_OLD_STATE, _OUTSIDE]
        return [_RESULTS, *others] if kept else [*others, _RESULTS]
    causes = [_DATA, _FORWARD if bad.mean() > 0.9 else _LAYER]
    if scale > 1 and not finite:
        causes.append(_TOO_HIGH if fixed or not kept else _RESULTS)
    return [*causes, _RESULTS if kept else _OLD_STATE][:3]


def _nonfinite(report: GradientReport) -> np.ndarray:
    """Return for each array with elements whether it has NaN or inf."""
    fields = (report.nan, report.inf, report.size)
    nan, inf, size = map(np.array, map(jax.tree.leaves, jax.device_get(fields)))
    return (nan + inf)[size > 0] > 0
