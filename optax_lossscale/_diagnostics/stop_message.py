"""Say what has happened, its likeliest causes, and the way out of each."""

import functools
import textwrap
from typing import Any, NamedTuple

import jax
import numpy as np

from .table import format_report

# The only place in the package that knows where the book is.
BOOK = "https://github.com/optax-lossscale/optax_lossscale/blob/main/notebooks/"


class _Cause(NamedTuple):
    means: str
    do: str
    page: str

    def __str__(self) -> str:
        return f"{self.means} {self.do} {BOOK}{self.page}"


_HELP = "troubleshooting.md#"
_FORWARD = _Cause(
    "The forward pass overflows: an activation is above 65504, the largest float16.",
    "No loss scale helps. `autocast_report` finds it. Compute it in float32.",
    f"{_HELP}an-activation-above-65504",
)
_LAYER = _Cause(
    "The backward pass overflows or divides by zero, in the layer of the array with "
    "NaN or inf that is closest to the loss, or right behind it.",
    "Compute that in float32, or wrap it with `scale_block`.",
    "finding_the_overflow.ipynb",
)
_DERIVATIVE = _Cause(
    "The derivative of `sqrt`, a norm or `log` is NaN or inf at 0, even in a branch "
    "that `jnp.where` does not take.",
    "Keep 0 out of it: `sqrt(where(x > 0, x, 1))`.",
    f"{_HELP}nan-gradients-of-a-finite-loss",
)
_EMPTY = _Cause(
    "A mean over nothing, as for a batch without one label, is 0/0.",
    "Divide by `jnp.maximum(count, 1)`.",
    f"{_HELP}a-mean-over-nothing",
)
_FLOOR = _Cause(
    "The gradients overflow at any scale from 1, as those of a sum do.",
    "Return the mean, or use `DynamicLossScale(min_scale=2.0**-20)`.",
    f"{_HELP}a-scale-below-1",
)
_DATA = _Cause(
    "The batch or the parameters hold NaN or inf, or what you carry from step to step, "
    "such as a recurrent state or running statistics.",
    "Check all with `all_finite`. If training has diverged, lower the learning rate.",
    f"{_HELP}the-loss-is-nan-from-the-first-step",
)
_LABEL = _Cause(
    "A label is out of range, such as -100: JAX reads NaN past the end of an array.",
    "Replace it before the loss, and mask with `jnp.where(mask, losses, 0)`.",
    f"{_HELP}a-label-out-of-range",
)
_MASKED = _Cause(
    "A mask multiplies an inf by 0, which is NaN.",
    "Select instead: `jnp.where(mask, x, 0)`.",
    f"{_HELP}a-label-out-of-range",
)
_BATCHES = _Cause(
    "Some batches hold NaN or inf, or not one label.",
    "Find them, and pass `value=jnp.where(all_finite(inputs), loss, jnp.nan)` to "
    "`update`, so that they do not lower the scale.",
    f"{_HELP}the-scale-falls-to-1",
)
_INTERVAL = _Cause(
    "The scale grows too soon and overflows again.",
    "Raise `growth_interval`.",
    f"{_HELP}every-second-step-is-skipped",
)
_TOO_HIGH = _Cause(
    "The scale is too high, if it is fixed or still falling.",
    "Start from what `suggest_loss_scale` returns.",
    f"{_HELP}the-first-scale",
)
_OLD_STATE = _Cause(
    "The gradient function was built once, from an earlier state.",
    "Build it in the step.",
    "start/guarantees.md#call-it-inside-the-compiled-function",
)
_FLAG = _Cause(
    "If you pass `grads_finite`: the flag is the wrong way round, as `found_inf` of "
    "other systems is.",
    "Pass `~found_inf`.",
    "guides/wrappers.md#what-else-can-skip-a-step",
)
_OUTSIDE = _Cause(
    "A wrapper outside `with_loss_scaling`, such as `MultiSteps`, keeps a NaN or hides "
    "overflows.",
    "Put `with_loss_scaling` around it.",
    "guides/wrappers.md",
)
_RESULTS = _Cause(
    "If you use `check_updates=True`: the optimizer turns finite gradients into NaN or "
    "inf.",
    "Clip the gradients, raise `eps`, or use `with_master_weights`.",
    "start/guarantees.md#optimizers-that-overflow",
)
_RESTORED = _Cause(
    "The state was restored from a run that had failed, or was set by hand.",
    "Set a scale: `optax.tree.set(opt_state, loss_scale=2.0**15)`.",
    "start/rules.md#restored-scales-and-another-rule",
)
_NOT_SCALED = _Cause(
    "The loss is not scaled.",
    "Call `value_and_grad` of this package, not JAX's.",
    f"{_HELP}the-scale-climbs-to-the-ceiling",
)
_NOT_FLOAT16 = _Cause(
    "Nothing is computed in float16: use `FixedLossScale(1.0)`.",
    "Or all gradients are below 0.004, and all is well.",
    "start/do_i_need_it.md",
)
_UNDONE = _Cause(
    "The step leaves `update` out (`if`, `lax.cond`), or puts back the old optimizer "
    "state, as steps with Flax's `DynamicScale` do.",
    "Leave the decision to `update`.",
    f"{_HELP}the-update-is-left-out",
)
_REPLACED = _Cause(
    "NaN is replaced before `update`, by `nan_to_num` or `jnp.where`, so that the rule "
    "never sees an overflow. Or `grads` are not those of this step.",
    "Pass `update` what `value_and_grad` returns.",
    f"{_HELP}the-update-is-left-out",
)
_UNREACHED = _Cause(
    "The loss does not reach the parameters: a `stop_gradient`, parameters that were "
    "closed over, or a mask that leaves nothing.",
    "Differentiate the argument that the loss uses.",
    f"{_HELP}all-gradients-are-0",
)
_COUNT = _Cause(
    "A mean divides by a count that overflowed: above 65504 it is inf in float16.",
    "Count in float32 or int32.",
    f"{_HELP}all-gradients-are-0",
)
_FLUSHED = _Cause(
    "All gradients underflow in float16, if the scale is fixed or still small.",
    "Start from what `suggest_loss_scale` returns.",
    f"{_HELP}the-first-scale",
)

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
    "skips of late": "Of late, {skip_rate:.0%} of the steps{member} were skipped.",
}
EVENTS = WARNINGS | _ERRORS  # in the order in which they are told
_NUMBERS = "Loss scale: {loss_scale:g}. Skipped in all: {skipped_steps}."

# The causes of each event, the likeliest first. Those of skips in a row depend on the
# loss and the gradients, see ``_known``.
_CAUSES = {
    "never overflowed": (_NOT_SCALED, _NOT_FLOAT16, _OUTSIDE),
    "undone": (_UNDONE, _REPLACED, _OUTSIDE),
    "all zero": (_UNREACHED, _COUNT, _FLUSHED),
    "at the floor": (_BATCHES, _FORWARD, _LAYER),
    "skips of late": (_BATCHES, _FORWARD, _INTERVAL),
    "invalid scale": (_RESTORED,),
    "loss unknown": (_DATA, _FORWARD, _FLOOR, _TOO_HIGH),
    "loss not finite": (_DATA, _FORWARD, _EMPTY),
    "loss not finite, gradients finite": (_LABEL, _MASKED, _DATA),
    "gradients inf": (_FLOOR, _TOO_HIGH, _LAYER, _OLD_STATE),
    "gradients NaN": (_TOO_HIGH, _DERIVATIVE, _EMPTY, _LAYER),
    "gradients finite": (_RESULTS, _FLAG, _OUTSIDE),
}


def message(
    event: str, limit: int, due: Any, state: Any, report: Any, value: Any
) -> str:
    """Return what has happened, at most three causes, and for an error the report.

    Lines have up to 80 columns. An address is longer, so it gets a line of its own.
    """
    # In an ensemble, the first member for which the event is due.
    member = np.unravel_index(np.argmax(due), np.shape(due))
    named = f" of member {', '.join(map(str, member))}" if member else ""
    state = state._replace(rule_state=())
    state = jax.tree.map(lambda x: np.asarray(x)[member], state)
    texts = [EVENTS[event], _NUMBERS] if event in _ERRORS else [EVENTS[event]]
    fields = {"limit": limit, "member": named, **state._asdict()}
    texts = [text.format(**fields) for text in texts]
    causes = _CAUSES.get(event) or _CAUSES[_known(report, value)]
    excluded = _TOO_HIGH if state.loss_scale <= 1 else _FLOOR
    fitting = [cause for cause in causes if cause is not excluded][:3]
    texts += [f"{i}. {cause}" for i, cause in enumerate(fitting, start=1)]
    fill = functools.partial(
        textwrap.fill,
        width=80,
        break_on_hyphens=False,
        break_long_words=False,
        subsequent_indent="   ",
    )
    texts = [*map(fill, texts)]
    if event in _ERRORS and report is not None:
        texts += ["The last gradients:", format_report(report, limit=5)]
    return "\n".join(texts)


def _known(report: Any, value: Any) -> str:
    """Return what is known of the loss and the gradients of skipped steps."""
    bad_loss = value is not None and not np.isfinite(float(value))
    if report is None:
        return (
            "loss not finite"
            if bad_loss
            else "loss unknown"
            if value is None
            else "gradients inf"
        )
    nan, inf = (any(map(float, jax.tree.leaves(x))) for x in (report.nan, report.inf))
    if bad_loss:
        return "loss not finite" if nan or inf else "loss not finite, gradients finite"
    if nan:
        return "loss unknown" if value is None else "gradients NaN"
    return "gradients inf" if inf else "gradients finite"
