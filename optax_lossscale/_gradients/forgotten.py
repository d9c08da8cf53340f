"""Warn of a train step that forgets to scale or unscale, or does either twice.

It tells only what is certain. Inside one step, the functions that scale and unscale get
the same object as ``loss_scale``, an array or a tracer, and so does ``update``. Notes
tell what was done with such an object, and which losses and gradients are its results.
Parts of a step that are traced apart have other objects: for these it only remembers
whether a loss was ever scaled for an optimizer state of the same structure.
"""

import contextlib
import enum
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .._find import find_state, raw_scale_state
from .._flax_internals.nnx_objects import unwrap
from .._jax_internals import is_staging
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced, warn


class Use(enum.Enum):
    """What a function does with a scale."""

    SCALES = "a loss"
    DIVIDES = "gradients"
    BOTH = "a loss and its gradients"


# Notes on arrays and tracers, by their identity. They live as long as these. A note is
# one entry, written and read at once, so that threads do not disturb each other.
_notes: dict[tuple[int, Use | str], tuple[weakref.ref[Any], Any]] = {}
# Hashes of the structures of optimizer states for which a loss was scaled, and of those
# whose gradients were divided where no loss was scaled. A structure itself would keep
# the static data of a model alive. None: of a scale without optimizer.
_scaled: set[int | None] = set()
_unscaled_apart: set[int | None] = set()


def _note(what: Use | str, x: Any, value: Any = True) -> None:
    # Python numbers have no weak references, and equal ones may be one object.
    if isinstance(x, jax.Array | np.ndarray):
        key = id(x), what
        _notes[key] = weakref.ref(x, lambda _: _notes.pop(key, None)), value


def _noted(what: Use | str, x: Any) -> Any:
    ref, value = _notes.get((id(x), what), (None, None))
    return value if ref and ref() is x else None


class _Division(NamedTuple):
    """What is noted of gradients that were divided."""

    state: LossScaleState | None  # by whose scale; None if it is traced


@contextlib.contextmanager
def using_scale(state: Any, use: Use) -> Iterator[LossScaleState]:
    """Yield the state whose scale a function uses. If that raises, nothing is noted."""
    found = find_state(state)
    raw = raw_scale_state(found)
    scale_state = check_state(raw)
    yield scale_state
    for x in (raw.loss_scale, scale_state.loss_scale):
        _note(use, x)
    structure = _structure(found)
    _scaled.add(structure)
    if use is Use.DIVIDES and not _noted(Use.SCALES, raw.loss_scale):
        _unscaled_apart.add(structure)


def note_number() -> None:
    """Note that a loss is scaled by a number, which may be the scale of any state."""
    _scaled.add(None)


def note_scaled(losses: Any) -> None:
    """Note that losses have been multiplied by a scale."""
    for x in jax.tree.leaves(losses):
        _note("scaled", x)


def note_true(grads: Any, state: LossScaleState, scaled_grads: Any = None) -> None:
    """Note that gradients have been divided by the scale of a state.

    Leaves that ``scaled_grads`` also holds, such as integers, have not been divided.
    """
    unchanged = set(map(id, jax.tree.leaves(scaled_grads)))
    by = _Division(None if is_traced((state.loss_scale, state.is_fixed)) else state)
    for x in jax.tree.leaves(grads):
        if id(x) not in unchanged:
            _note("divided", x, by)


def warn_if_scaled_twice(loss: Any) -> None:
    if _noted("scaled", loss):
        warn(
            "The loss is scaled twice: `scale_loss` has scaled it already. "
            "`value_and_grad` scales the loss itself. Leave out `scale_loss`."
        )


def warn_if_divided_twice(grads: Any) -> None:
    if _divided_by(grads):
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return true gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def warn_if_forgotten(state: WithLossScalingState, rule: Any, grads: Any) -> None:
    """Warn at the update of a step whose loss was not scaled, or not unscaled."""
    scale = state.scale_state.loss_scale
    divided_by = _divided_by(grads)
    if divided_by:
        constant = _constant_scale(scale, divided_by)
        if constant is not None:
            warn(
                f"The loss scale, {constant:g}, is a constant of a compiled function, "
                "or of the body of a `scan`, so it never changes. Call "
                "`value_and_grad(loss_fn, opt_state)` inside of it, with an "
                "`opt_state` that is among its arguments.",
                "start/guarantees.md#call-it-inside-the-compiled-function",
            )
        return
    uses = {use for use in Use if _noted(use, scale)}
    known = {_structure(state), None}
    if not uses and not known & _scaled:
        warn(
            "No loss has been scaled for this optimizer state. In the step, write "
            "`loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, ...)` "
            "instead of `jax.value_and_grad(loss_fn)(params, ...)`. If nothing should "
            "be scaled, wrap the optimizer with `skip_nonfinite` instead.",
            "troubleshooting.md#no-loss-has-been-scaled",
        )
    elif uses == {Use.SCALES} and not known & _unscaled_apart:
        warn(
            "`scale_loss` has scaled a loss, but `unscale_grads` has divided no "
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )


def _divided_by(grads: Any) -> list[tuple[jax.Array, LossScaleState | None]]:
    """Return the gradients that were divided, and the states by whose scales."""
    leaves = jax.tree.leaves(grads)
    return [(x, by.state) for x in leaves if (by := _noted("divided", x))]


def _constant_scale(scale: Any, divided_by: list[tuple[Any, Any]]) -> float | None:
    """Return the constant by which traced gradients were divided, if that is one.

    The scale of the update is traced in the same program, so it will change.
    """
    if not (isinstance(scale, jax.core.Tracer) and is_staging()):
        return None
    states = [by for x, by in divided_by if by and isinstance(x, jax.core.Tracer)]
    if not states or jax.device_get(states[0].is_fixed):
        return None
    return float(jax.device_get(states[0].loss_scale))


def _structure(state: WithLossScalingState | LossScaleState) -> int | None:
    if isinstance(state, LossScaleState):
        return None
    leaves, structure = jax.tree_util.tree_flatten_with_path(unwrap(state.inner_state))
    # The hash of a structure leaves out names and static data.
    return hash((structure, *(path for path, _ in leaves)))
