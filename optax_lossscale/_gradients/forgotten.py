"""Warn of a train step that forgets to scale or unscale, or does either twice.

It warns only if a mistake is certain. Within one step, the functions that scale, those
that unscale, and ``update`` get the same ``loss_scale`` object, an array or a tracer.
Its identity links them. Parts of a step that are traced separately get different
objects. Only the structure of the optimizer state links these.
"""

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._find import find_state, raw_scale_state
from .._flax_internals.nnx_objects import unwrap
from .._jax_internals import is_staging
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced, warn


class Note(enum.Enum):
    """A fact that is remembered of an array or a tracer, or of the owner of a scale."""

    SCALES = enum.auto()  # a scale or an owner: a loss was multiplied
    DIVIDES = enum.auto()  # a scale or an owner: the gradients of a loss were divided
    RETURNED = enum.auto()  # a scale: `update` returned it
    SCALED = enum.auto()  # a loss: it was multiplied
    DIVIDED = enum.auto()  # gradients: by the scale of which state, and its owner
    DIVIDED_INSIDE = enum.auto()  # the same, by a function inside of the loss
    SCALED_GRADS = enum.auto()  # gradients: they were given to be divided


# Each note is one entry, written and read at once, so that threads do not disturb each
# other. Those on arrays and tracers, by their identity, live as long as these.
notes: dict[tuple[Note, int | None], tuple[weakref.ref[Any] | None, Any]] = {}


def note(what: Note, tree: Any, value: Any = True) -> None:
    """Remember something of each array and tracer in a tree."""
    for x in jax.tree.leaves(tree):
        # Python numbers have no weak references, and equal ones may be one object.
        if isinstance(x, jax.Array | np.ndarray):
            key = what, id(x)
            # The reference itself is passed as the default of `pop`.
            notes[key] = weakref.ref(x, functools.partial(notes.pop, key)), value


def noted(what: Note, tree: Any) -> Any:
    """Return the value noted for the first such leaf in a tree, or None."""
    for x in jax.tree.leaves(tree):
        ref, value = notes.get((what, id(x)), (None, None))
        if ref and ref() is x:
            return value
    return None


@contextlib.contextmanager
def using_scale(
    state: Any, *uses: Note, call: str = "", name: str = "state"
) -> Iterator[LossScaleState]:
    """Yield the state whose scale a function uses. If that raises, nothing is noted."""
    found = find_state(state, call, name)
    raw = raw_scale_state(found)
    yield check_state(raw)
    note_uses(raw.loss_scale, uses, _owner(found))


def note_uses(scale: Any, uses: tuple[Note, ...], owner: int | None = None) -> None:
    """Note how a function has used a scale, and whose that is."""
    notes[Note.SCALES, owner] = None, True
    if Note.SCALES in uses or noted(Note.SCALES, scale):
        for use in uses:
            note(use, scale)
    # The loss was scaled separately, or never, if `update` just returned the scale.
    elif not noted(Note.RETURNED, scale):
        note(Note.DIVIDES, scale)
        notes[Note.DIVIDES, owner] = None, True


def note_divided(
    grads: Any, state: Any, scaled_grads: Any = None, how: Note = Note.DIVIDED
) -> None:
    """Note that gradients have been divided by the scale of a state.

    Leaves that ``scaled_grads`` also holds, such as integers, have not been divided.
    """
    unchanged = set(map(id, jax.tree.leaves(scaled_grads)))
    divided = [x for x in jax.tree.leaves(grads) if id(x) not in unchanged]
    found = find_state(state)
    note(how, divided, (raw_scale_state(found), _owner(found)))
    # Only of tracers is it certain that they are of this step.
    given = filter(is_traced, jax.tree.leaves(scaled_grads))
    results = set(map(id, jax.tree.leaves(grads)))
    note(Note.SCALED_GRADS, [x for x in given if id(x) not in results])


def warn_if_scaled_twice(loss: Any) -> None:
    if noted(Note.SCALED, loss):
        warn(
            "The loss is scaled twice: `scale_loss` has scaled it already. "
            "`value_and_grad` scales the loss itself. Leave out `scale_loss`."
        )


def warn_if_divided_twice(grads: Any, state: Any) -> None:
    scale = raw_scale_state(state).loss_scale
    inside = noted(Note.DIVIDED_INSIDE, grads)
    # A division inside of the loss may have been by another scale.
    if noted(Note.DIVIDED, grads) or inside and inside[0].loss_scale is scale:
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return unscaled gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def refuse_gradients(params: Any) -> None:
    """Raise if the parameters that ``update`` gets are the gradients of a loss."""
    if noted(Note.DIVIDED, params) or noted(Note.DIVIDED_INSIDE, params):
        raise ValueError(
            "`params` must be the parameters, got the gradients of a loss. Call "
            "`tx.update(grads, state, params)`."
        )


def warn_if_forgotten(state: WithLossScalingState, rule: Any, grads: Any) -> None:
    """Warn at the update of a step whose loss was not scaled, or not unscaled."""
    scale = state.scale_state.loss_scale
    if noted(Note.SCALED_GRADS, grads):
        warn(
            "`update` gets the gradients that `unscale_grads` was given, not the "
            "gradients that it returned. Write "
            "`grads = unscale_grads(grads, opt_state)`."
        )
        return
    owners = [_owner(state), None]
    if by := noted(Note.DIVIDED, grads) or noted(Note.DIVIDED_INSIDE, grads):
        used, owner = by
        # Only in one program is it certain that the scale of the update will change.
        in_program = is_traced(scale) and is_traced(grads) and is_staging()
        if used.loss_scale is not scale and in_program:
            is_another = owner not in owners and not noted(Note.SCALES, scale)
            _warn_of_another_scale(used, is_another)
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
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )


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


def _owner(state: WithLossScalingState | LossScaleState) -> int | None:
    """Return the structure of an optimizer state, without its names and static data.

    None if only the scale is known, which may belong to any optimizer. The hash does
    not keep the static data of a model alive.
    """
    if isinstance(state, LossScaleState):
        return None
    leaves, structure = jax.tree_util.tree_flatten_with_path(unwrap(state.inner_state))
    return hash((structure, *(path for path, _ in leaves)))
