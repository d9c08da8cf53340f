"""Warn of a train step that forgets to scale or unscale, or does either twice.

It warns only of what is certain. Inside one step, the functions that scale and unscale
get the same object as ``loss_scale``, an array or a tracer, and so does ``update``.
Parts of a step that are traced apart get other objects. Of these, only the structure of
the optimizer state is remembered.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from .._find import find_state, raw_scale_state
from .._flax_internals import unwrap
from .._jax_internals import is_staging
from .._notes import Note, note, noted, notes
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced, warn

# Whose a scale is: that of the optimizer states of one structure, see `_owner`, or, as
# far as is known, perhaps that of any, such as a number. What `rule.init()` returns is
# the scale of none, but may equal that of a fixed rule.
_ANY, _FIXED = "any", "fixed"


@contextlib.contextmanager
def using_scale(state: Any, *uses: Note) -> Iterator[LossScaleState]:
    """Yield the state whose scale a function uses. If that raises, nothing is noted."""
    found = find_state(state)
    raw = raw_scale_state(found)
    yield check_state(raw)
    if isinstance(found, WithLossScalingState):
        owner = _owner(found)
    else:
        owner = _FIXED if noted(Note.CREATED, raw.loss_scale) else _ANY
        owner = noted(Note.HELD, raw.loss_scale) or owner
    note_uses(raw.loss_scale, uses, owner)


def note_uses(scale: Any, uses: tuple[Note, ...], owner: str = _ANY) -> None:
    """Note how a function has used a scale, and whose that is."""
    notes[Note.SCALES, owner] = None, True
    if Note.SCALES in uses or noted(Note.SCALES, scale):
        for use in uses:
            note(use, scale)
    # The loss was scaled apart, or, if `update` has just returned the scale, never.
    elif not noted(Note.HELD, scale):
        note(Note.DIVIDES, scale)
        notes[Note.DIVIDES, owner] = None, True


def note_divided(grads: Any, state: LossScaleState, scaled_grads: Any = None) -> None:
    """Note that gradients have been divided by the scale of a state.

    Leaves that ``scaled_grads`` also holds, such as integers, have not been divided.
    """
    unchanged = set(map(id, jax.tree.leaves(scaled_grads)))
    divided = [x for x in jax.tree.leaves(grads) if id(x) not in unchanged]
    note(Note.DIVIDED, divided)
    if not is_traced((state.loss_scale, state.is_fixed)):
        note(Note.BY_CONSTANT, list(filter(is_traced, divided)), state)


def note_held(tx: Any) -> Any:
    """Note whose the scales are in the states that ``init`` and ``update`` return."""

    def held(state: WithLossScalingState) -> WithLossScalingState:
        note(Note.HELD, state.scale_state.loss_scale, _owner(state))
        return state

    def update_fn(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        updates, state = tx.update(*args, **kwargs)
        return updates, held(state)

    return tx._replace(init=lambda params: held(tx.init(params)), update=update_fn)


def warn_if_scaled_twice(loss: Any) -> None:
    if noted(Note.SCALED, loss):
        warn(
            "The loss is scaled twice: `scale_loss` has scaled it already. "
            "`value_and_grad` scales the loss itself. Leave out `scale_loss`."
        )


def warn_if_divided_twice(grads: Any) -> None:
    if noted(Note.DIVIDED, grads):
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return true gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def warn_if_forgotten(state: WithLossScalingState, rule: Any, grads: Any) -> None:
    """Warn at the update of a step whose loss was not scaled, or not unscaled."""
    scale = state.scale_state.loss_scale
    if noted(Note.DIVIDED, grads):
        _warn_if_constant(scale, noted(Note.BY_CONSTANT, grads))
        return
    owners = [_owner(state), _ANY]
    if isinstance(rule, FixedLossScale):
        owners.append(_FIXED)
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
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )


def _warn_if_constant(scale: Any, divided_by: LossScaleState | None) -> None:
    """Warn if traced gradients were divided by a constant that should change.

    The scale of the update is traced in the same program, so it will change.
    """
    if divided_by is None or not is_traced(scale) or not is_staging():
        return
    if not jax.device_get(divided_by.is_fixed):
        warn(
            f"The loss scale, {jax.device_get(divided_by.loss_scale):g}, is a constant "
            "of a compiled function, or of the body of a `scan`, so it never changes. "
            "Call `value_and_grad(loss_fn, opt_state)` inside of it, with an "
            "`opt_state` that is among its arguments.",
            "start/guarantees.md#call-it-inside-the-compiled-function",
        )


def _owner(state: WithLossScalingState) -> str:
    """Return the structure of an optimizer state, without its names and static data.

    The hash does not keep the static data of a model alive.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(unwrap(state.inner_state))
    return str(hash((structure, *(path for path, _ in leaves))))
