"""Which scale a function uses, and what has been done with it in a step.

Within one step, the functions that scale, those that unscale, and ``update`` get the
same ``loss_scale`` object, an array or a tracer. Its identity links them. Parts of a
step that are traced separately get different objects. Only the owner of the scale links
these: the structure of the optimizer state.

Which call writes which notes, and on what; `grad` and `value_and_grad_with_retries` do
as `value_and_grad`::

    value_and_grad  SCALES, DIVIDES  the scale
                    SCALES           the owner
                    DIVIDED          the gradients that it returns
    scale_backward  all of these; its DIVIDED says that it is inside of the loss, and is
                    left out if the scale is a number
    scale_loss      SCALES           the scale, the owner
                    SCALED           the loss that it returns
    unscale_grads   SCALES           the owner
                    DIVIDES          the scale, if it has SCALES
                    DIVIDES          the scale, the owner, if the scale has no note:
                                     the loss was scaled in a part traced separately
                    DIVIDED          the gradients that it returns
                    SCALED_GRADS     the gradients that it is given, if traced
    update          RETURNED         the scale that it returns
                    UPDATED          the count of skips that it is given
                    LENT             another scale, by which its gradients were divided

Which notes make `forgotten` warn or raise::

    scaled twice             the loss has SCALED, or is a product with the scale
    divided twice            the gradients have DIVIDED; inside, only by the same scale
    gradients as parameters  `params` have DIVIDED, but not the rest of `updates`
    result not used          the gradients have SCALED_GRADS
    divided by hand          the gradients are a product or a quotient of an array that
                             has DIVIDED and the scale
    overflow hidden          all gradients are clipped, of arrays that have DIVIDED
    retries without state    the gradients have DIVIDED, retried, by the same scale
    another scale, constant  the gradients have DIVIDED, by another scale; of a state of
                             the same owner only if the scale has LENT for that one
    nothing scaled           no DIVIDED; neither SCALES nor DIVIDES on scale or owner
    not divided              no DIVIDED; SCALES on the scale, no DIVIDES on either
"""

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .._find import State, find_state, raw_scale_state
from .._flax_internals.nnx_objects import unwrap
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced

Note = enum.Enum(
    "Note", "SCALES DIVIDES RETURNED UPDATED LENT SCALED DIVIDED SCALED_GRADS"
)


class Used(NamedTuple):
    """A scale that a function uses."""

    state: LossScaleState
    raw: LossScaleState  # with its own array objects
    owner: int | None
    is_inside: bool = False  # of a loss
    is_retried: bool = False  # and returned in a new state


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
    state: State, *uses: Note, call: str = "", name: str = "state"
) -> Iterator[Used]:
    """Yield the scale of a state for a function. If that raises, nothing is noted."""
    found = find_state(state, call, name)
    raw = raw_scale_state(found)
    used = Used(check_state(raw), raw, owner_of(found))
    yield used
    note_uses(raw.loss_scale, uses, used.owner)


def note_uses(scale: Any, uses: tuple[Note, ...], owner: int | None = None) -> None:
    """Note how a function has used a scale, and whose that is."""
    is_scaled = Note.SCALES in uses or noted(Note.SCALES, scale)
    is_separate = not is_scaled and not noted(Note.RETURNED, scale)
    for use in uses if is_scaled or is_separate else ():
        note(use, scale)
    for use in (Note.SCALES, Note.DIVIDES) if is_separate else (Note.SCALES,):
        notes[use, owner] = None, True


def note_divided(grads: optax.Updates, used: Used, scaled_grads: Any = None) -> None:
    """Note that gradients have been divided by a scale.

    Leaves that ``scaled_grads`` also holds, such as integers, have not been divided.
    """
    unchanged = set(map(id, jax.tree.leaves(scaled_grads)))
    divided = [x for x in jax.tree.leaves(grads) if id(x) not in unchanged]
    note(Note.DIVIDED, divided, used)
    # Only of tracers is it certain that they are of this step.
    given = filter(is_traced, jax.tree.leaves(scaled_grads))
    results = set(map(id, jax.tree.leaves(grads)))
    note(Note.SCALED_GRADS, [x for x in given if id(x) not in results])


def owner_of(state: WithLossScalingState | LossScaleState) -> int | None:
    """Return the structure of an optimizer state, without its names and static data.

    None if only the scale is known, which may belong to any optimizer. The hash does
    not keep the static data of a model alive.
    """
    if isinstance(state, LossScaleState):
        return None
    leaves, structure = jax.tree_util.tree_flatten_with_path(unwrap(state.inner_state))
    return hash((structure, *(path for path, _ in leaves)))
