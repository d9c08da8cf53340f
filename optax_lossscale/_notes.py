"""What has been done with arrays and tracers, for warnings of forgotten lines."""

import enum
import functools
import weakref
from typing import Any

import jax
import numpy as np


class Note(enum.Enum):
    """What is remembered of an array or a tracer, or of the owner of a scale."""

    SCALES = enum.auto()  # a scale or an owner: a loss was multiplied
    DIVIDES = enum.auto()  # a scale or an owner: the gradients of a loss were divided
    CREATED = enum.auto()  # a scale: `LossScaleState.create` returned it
    HELD = enum.auto()  # a scale: `init` or `update` returned it, for this owner
    SCALED = enum.auto()  # a loss: it was multiplied
    DIVIDED = enum.auto()  # gradients: they were divided
    BY_CONSTANT = enum.auto()  # traced gradients: by the scale of this concrete state


# Each note is one entry, written and read at once, so that threads do not disturb each
# other. Those on arrays and tracers, by their identity, live as long as these.
notes: dict[tuple[Note, int | str], tuple[weakref.ref[Any] | None, Any]] = {}


def note(what: Note, tree: Any, value: Any = True) -> None:
    """Remember something of each array and tracer in a tree."""
    for x in jax.tree.leaves(tree):
        # Python numbers have no weak references, and equal ones may be one object.
        if isinstance(x, jax.Array | np.ndarray):
            key = what, id(x)
            # The reference itself is passed as the default of `pop`.
            notes[key] = weakref.ref(x, functools.partial(notes.pop, key)), value


def noted(what: Note, tree: Any) -> Any:
    """Return what is remembered of the first such leaf in a tree, or None."""
    for x in jax.tree.leaves(tree):
        ref, value = notes.get((what, id(x)), (None, None))
        if ref and ref() is x:
            return value
    return None
