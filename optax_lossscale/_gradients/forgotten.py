"""Warn of a train step that forgets to scale or unscale, or does either twice.

It tells only what is certain. Inside one step, the functions that scale and unscale get
the same object as ``loss_scale``, an array or a tracer, and so does ``update``. Each
object has a note of what was done with it. Parts of a step that are traced apart have
other objects: for these it only remembers whether a loss was ever scaled for an
optimizer state of the same structure. Notes are written by single operations of
dictionaries and sets, so that threads do not disturb each other.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._find import find_state, raw_scale_state
from .._flax_internals import unwrap
from .._jax_internals import is_staging
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced, warn


class _Notes:
    """Notes on arrays and tracers, by their identity. They live as long as these."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, x: Any) -> Any:
        ref, note = self._notes.get(id(x), (None, None))
        return note if ref and ref() is x else None

    def put(self, x: Any, note: Any) -> None:
        key = id(x)
        # Python numbers have no weak references, and equal ones may be one object.
        if isinstance(x, jax.Array | np.ndarray):
            ref = weakref.ref(x, lambda _: self._notes.pop(key, None))
            self._notes[key] = ref, note


# Of a scale: the names of the functions that were given it, a set.
_functions = _Notes()
# Of a true gradient: a tuple of the state by whose scale it was divided, or of None if
# that is traced.
_divided_by = _Notes()
# The structures of optimizer states for which a loss was scaled, and of those whose
# gradients were divided where no loss was scaled. None: of a scale without optimizer.
_scaled: set[Any] = set()
_unscaled_apart: set[Any] = set()


@contextlib.contextmanager
def using_scale(state: Any, by: str) -> Iterator[LossScaleState]:
    """Yield the state whose scale a function uses. If that raises, nothing is noted."""
    raw = raw_scale_state(state)
    scale_state = check_state(raw)
    yield scale_state
    names = _functions.get(raw.loss_scale) or set()
    names.add(by)
    for x in (raw.loss_scale, scale_state.loss_scale):
        _functions.put(x, names)
    structure = _structure(find_state(state))
    _scaled.add(structure)
    if by == "unscale_grads" and "scale_loss" not in names:
        _unscaled_apart.add(structure)


def note_number() -> None:
    """Note that a loss is scaled by a number, which may be the scale of any state."""
    _scaled.add(None)


def note_true(grads: Any, state: LossScaleState, scaled_grads: Any = None) -> None:
    """Note that gradients have been divided by the scale of a state.

    Leaves that ``scaled_grads`` also holds, such as integers, have not been divided.
    """
    unchanged = set(map(id, jax.tree.leaves(scaled_grads)))
    note = (None if is_traced((state.loss_scale, state.is_fixed)) else state,)
    for x in jax.tree.leaves(grads):
        if id(x) not in unchanged:
            _divided_by.put(x, note)


def warn_if_divided_twice(grads: Any) -> None:
    if any(map(_divided_by.get, jax.tree.leaves(grads))):
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return true gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def warn_if_forgotten(state: WithLossScalingState, rule: Any, grads: Any) -> None:
    """Warn at the update of a step whose loss was not scaled, or not unscaled."""
    if getattr(rule, "loss_scale", None) == 1:  # it is fixed
        return
    names = _functions.get(state.scale_state.loss_scale) or set()
    known = {_structure(state), None}
    constant = _constant_scale(state.scale_state.loss_scale, grads)
    if constant is not None:
        warn(
            f"The loss scale, {constant:g}, is a constant of a compiled function, or "
            "of the body of a `scan`, because the state that `value_and_grad` was "
            "given is not one of its arguments. Whenever that runs again without being "
            "traced, it uses this scale. Once the scale overflows, every step is "
            "skipped. Call `value_and_grad(loss_fn, opt_state)` inside the compiled "
            "function, with the `opt_state` that is passed to it. If the scale should "
            "never change, use `FixedLossScale`."
        )
    elif not names and not known & _scaled:
        warn(
            "No loss has been scaled for this optimizer state, whose rule is "
            f"{rule!r}. Write "
            "`loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, ...)` "
            "instead of `jax.value_and_grad(loss_fn)(params, ...)`, in the step, with "
            "the state of this step. If you multiply the loss yourself, use "
            "`ls.scale_loss` and `ls.unscale_grads`. If nothing should be scaled, pass "
            "the rule `FixedLossScale(1.0)`. If the gradients are computed in another "
            "process, or are traced later than `update`, silence this: "
            '`warnings.filterwarnings("ignore", "No loss has been scaled")`.'
        )
    elif "scale_loss" in names and "unscale_grads" not in names | _apart(known):
        scaled_twice = names - {"scale_loss"}
        warn(
            "The loss is scaled twice: `scale_loss` is called in a step whose loss "
            f"`{min(scaled_twice)}` scales. Leave out `scale_loss`."
            if scaled_twice
            else "`scale_loss` has scaled a loss, but `unscale_grads` has divided no "
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )


def _apart(structures: set[Any]) -> set[str]:
    return {"unscale_grads"} if structures & _unscaled_apart else set()


def _constant_scale(scale: Any, grads: Any) -> float | None:
    """Return the constant by which traced gradients were divided, if that is one.

    The scale of the update is traced in the same program, so it will change.
    """
    if not (isinstance(scale, jax.core.Tracer) and is_staging()):
        return None
    tracers = [x for x in jax.tree.leaves(grads) if isinstance(x, jax.core.Tracer)]
    states = [note[0] for note in map(_divided_by.get, tracers) if note and note[0]]
    if not states or jax.device_get(states[0].is_fixed):
        return None
    return float(jax.device_get(states[0].loss_scale))


def _structure(state: WithLossScalingState | LossScaleState) -> Any:
    if isinstance(state, LossScaleState):
        return None
    return jax.tree.structure(unwrap(state.inner_state))
