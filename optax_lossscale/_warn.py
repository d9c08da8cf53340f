"""Warn at the line of the user, and of a loss that is not scaled or scaled twice."""

import sys
import warnings
from typing import Any

# Frames of these stand between the line of the user and the reason.
_SKIPPED = {__name__.partition(".")[0], "jax", "optax", "flax", "equinox", "contextlib"}

# What has happened in this process: "scale read", "loss scaled", "gradients unscaled";
# and "differentiating" while `value_and_grad` calls a loss function.
NOTED: set[str] = set()


def warn(message: str) -> None:
    """Warn at the first line outside of this package and of those that call it back."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in _SKIPPED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def note_scaled_loss() -> None:
    """Note that `scale_loss` is called, and warn if the loss is scaled anyway."""
    NOTED.add("loss scaled")
    if "differentiating" in NOTED:
        warn(
            "The loss is scaled twice: `scale_loss` is called in a function that "
            "`value_and_grad` of this package differentiates. Leave out `scale_loss`."
        )


def warn_if_not_scaled(rule: Any) -> None:
    """Warn, once in a process, of a first update whose loss was not scaled."""
    if "scale read" not in NOTED:
        warn(
            f"No loss has been scaled: nothing has read the scale of {rule!r}. Write "
            "`loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, ...)` "
            "instead of `jax.value_and_grad(loss_fn)(params, ...)`. If nothing should "
            "be scaled, pass the rule `FixedLossScale(1.0)`."
        )
    elif "loss scaled" in NOTED and "gradients unscaled" not in NOTED:
        warn(
            "`scale_loss` has scaled a loss, but `unscale_grads` has divided no "
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )
    NOTED.update(("scale read", "gradients unscaled"))
