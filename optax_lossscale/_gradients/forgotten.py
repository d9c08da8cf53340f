"""Warn of a train step that forgets to scale or unscale, or does either twice.

It warns only if a mistake is certain. A table in `notes` shows by which notes.
"""

import itertools
from typing import Any

import jax
import optax

from .._jax_internals import clipped_operands, is_staging, operands
from .._state import LossScaleState, WithLossScalingState
from .._validation import is_traced, warn
from .notes import Note, Used, note, noted, notes, owner_of


def warn_if_scaled_twice(loss: Any, scale: Any) -> None:
    if noted(Note.SCALED, loss):
        warn(
            "The loss is scaled twice: `scale_loss` has scaled it already. "
            "`value_and_grad` scales the loss itself. Leave out `scale_loss`."
        )
    # The primal of a loss that is being differentiated has the equation.
    elif any(
        _is_from(x, scale) for x in operands(getattr(loss, "primal", loss), "mul")
    ):
        warn(
            "The loss is scaled twice: it is a product with the loss scale already. "
            "`value_and_grad` and `scale_loss` scale the loss themselves. Return the "
            "loss without this factor."
        )


def warn_if_divided_twice(grads: optax.Updates, scale: Any) -> None:
    by: Used | None = noted(Note.DIVIDED, grads)
    # A division inside of the loss may have been by another scale.
    if by and not (by.is_inside and by.raw.loss_scale is not scale):
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return unscaled gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def refuse_gradients(params: optax.Params | None, updates: optax.Updates) -> None:
    """Raise if ``update`` gets the gradients of a loss as parameters.

    Weights may start as a gradient. Then ``updates`` are other gradients.
    """
    own = set(map(id, jax.tree.leaves(params)))
    others = [x for x in jax.tree.leaves(updates) if id(x) not in own]
    if noted(Note.DIVIDED, params) and not noted(Note.DIVIDED, others):
        raise ValueError(
            "`params` holds gradients of the loss, not parameters. Call "
            "`tx.update(grads, state, params)`. If the parameters start as a gradient, "
            "copy it: `jax.tree.map(jnp.copy, grads)`."
        )


def warn_if_forgotten(
    state: WithLossScalingState, grads: optax.Updates, has_flag: bool
) -> None:
    """Warn at the update of a step whose loss was not scaled, or not unscaled.

    With a flag of the user's own, an overflow of other gradients may lower the scale.
    """
    scale = state.scale_state.loss_scale
    if noted(Note.SCALED_GRADS, grads):
        warn(
            "`update` got the input of `unscale_grads` instead of its result. Write "
            "`grads = unscale_grads(grads, opt_state)`."
        )
        return
    if any(_is_rescaled(x, scale) for x in jax.tree.leaves(grads)):
        warn(
            "`update` gets gradients that were multiplied or divided by the loss scale "
            "by hand. Pass the gradients that `value_and_grad` or `unscale_grads` "
            "returned: they are unscaled."
        )
        return
    owners = [owner_of(state), None]
    by: Used | None = noted(Note.DIVIDED, grads)
    if by:
        used = by.raw.loss_scale
        if by.is_retried and used is scale:
            warn(
                "`update` gets the state that `value_and_grad_with_retries` was given, "
                "so the next step starts at the scale that overflowed. Pass the state "
                "that it returned: `loss, grads, opt_state = ...`."
            )
        # Only in one program is it certain that the scale of the update will change.
        in_program = is_traced(scale) and is_traced(grads) and is_staging()
        if used is not scale and in_program:
            is_another = by.owner not in owners and not noted(Note.SCALES, scale)
            is_another |= noted(Note.LENT, scale) == id(used)
            note(Note.LENT, used, id(scale))
            _warn_of_another_scale(by.raw, is_another and not has_flag)
        return
    scaled, divided = (
        noted(what, scale) or any((what, x) in notes for x in owners)
        for what in (Note.SCALES, Note.DIVIDES)
    )
    if not scaled and not divided:
        warn(
            "No loss has been scaled for this optimizer state. In the step, write "
            "`loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, ...)` "
            "instead of `jax.value_and_grad(loss_fn)(params, ...)`. If nothing should "
            "be scaled, wrap the optimizer with `skip_nonfinite` instead.",
            "troubleshooting.md#no-loss-has-been-scaled",
        )
    elif noted(Note.SCALES, scale) and not divided:
        warn(
            "`scale_loss` has scaled a loss, but `unscale_grads` has divided no "
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before "
            "`update`, also instead of a division by hand."
        )


def warn_if_overflow_is_hidden(grads: optax.Updates) -> None:
    """Warn if ``update`` gets unscaled gradients whose inf were made finite."""
    leaves = jax.tree.leaves(grads)
    by = [noted(Note.DIVIDED, clipped_operands(x)) for x in leaves]
    if by and all(by) and not by[0].is_retried:
        warn(
            "`update` gets gradients after `jnp.clip` or `jnp.nan_to_num`, which make "
            "inf finite: it applies a step that overflows, and the scale does not "
            "fall. Clip inside, as in "
            "`with_loss_scaling(optax.chain(optax.clip(1.0), optimizer))`, or pass "
            "`grads_finite=all_finite(grads)`, of the gradients before.",
            "guides/wrappers.md",
        )


def _is_rescaled(x: Any, scale: Any) -> bool:
    """Return whether this is an unscaled gradient times the scale, or divided by it."""
    if noted(Note.DIVIDED, x):
        return False  # by a function of this package
    pairs = itertools.permutations(operands(x, "mul", "div"), 2)
    return any(noted(Note.DIVIDED, y) and _is_from(z, scale) for y, z in pairs)


def _is_from(x: Any, scale: Any) -> bool:
    """Return whether this is the scale or its reciprocal, in any dtype and shape."""
    names = "div", "integer_pow", "convert_element_type", "broadcast_in_dim"
    return x is scale or any(_is_from(y, scale) for y in operands(x, *names))


def _warn_of_another_scale(used: LossScaleState, is_of_another: bool) -> None:
    """Warn if gradients were divided by a scale that their update does not change."""
    if is_traced((used.loss_scale, used.is_fixed)):
        if is_of_another:
            warn(
                "The gradients were computed at the loss scale of another optimizer. "
                "If they overflow, this scale is not lowered. Pass the `opt_state` of "
                "this `update` to `value_and_grad`.",
                "guides/several_losses.md",
            )
    elif not jax.device_get(used.is_fixed):
        warn(
            f"The loss scale, {jax.device_get(used.loss_scale):g}, is a constant of a "
            "compiled function, or of the body of a `scan`, so it never changes. Call "
            "`value_and_grad(loss_fn, opt_state)` or `scale_backward` inside that "
            "function, with an `opt_state` that is one of the function's arguments.",
            "start/guarantees.md#call-it-inside-the-compiled-function",
        )
