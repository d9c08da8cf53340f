"""Which scale a function uses, and what has been done with it in a step.

Within one step, the functions that scale, those that unscale, and ``update`` get the
same ``loss_scale`` object, an array or a tracer. Its identity links them. Parts of a
step that are traced separately get different objects. Only the structure of the
optimizer state links these.
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
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced


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
    note_uses(raw.loss_scale, uses, owner_of(found))


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
    note(how, divided, (raw_scale_state(found), owner_of(found)))
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
