"""Warn of a train step that forgets to scale or unscale, or does either twice.

In one step, the function that scales the loss and ``update`` get the same object as
``loss_scale``, an array or a tracer. This module notes the use of each such object as
long as it lives. If the parts of a step are traced separately, their objects differ.
Then it counts scaled losses and updates instead, by the shapes of the optimizer state.
"""

import collections
import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._find import check_outermost, find_nodes, raw_scale_state
from .._flax_internals import unwrap
from .._jax_internals import is_staging
from .._state import LossScaleState, WithLossScalingState, check_state
from .._validation import is_traced, warn

Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(eq=False)
class _History:
    """What happened to optimizer states of some shapes.

    Attributes:
        waiting: how many scales were used and wait for an update, by the function that
            used them first, or by "constant".
        apart: whether the parts of the last step were traced separately.
        constant: the last scale that a compiled function held as a constant.
    """

    waiting: collections.Counter[str]
    apart: bool = False
    constant: float = 0.0


@dataclasses.dataclass(eq=False)
class _Use:
    """What happened to one loss scale.

    Attributes:
        history: that of its optimizer state.
        by: the names of the functions that were given the scale, "update" included.
        waits_as: the key under which it waits in the history for its update.
    """

    history: _History
    by: set[str]
    waits_as: str = ""


class _Noted:
    """Notes on objects, by their identity. They live as long as the objects."""

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


_uses, _true_grads = _Noted(), _Noted()
# A scale without its optimizer is under None. It may belong to any optimizer.
_histories: dict[Shapes | None, _History] = collections.defaultdict(
    lambda: _History(collections.Counter())
)
# For each surrounding function that differentiates: the use of its scale, and how often
# each function is called inside with the same scale.
_around: contextvars.ContextVar[tuple[tuple[_Use, collections.Counter[str]], ...]]
_around = contextvars.ContextVar("around", default=())


def use_scale(state: Any, by: str) -> LossScaleState:
    """Return the state whose scale a function uses, and note that."""
    return _find_use(state, by)[0]


@contextlib.contextmanager
def differentiating_at(state: Any) -> Iterator[LossScaleState]:
    """Yield the state whose scale multiplies a loss, while it is differentiated."""
    scale_state, use = _find_use(state, "value_and_grad")
    calls: collections.Counter[str] = collections.Counter()
    token = _around.set((*_around.get(), (use, calls)))
    try:
        yield scale_state
    finally:
        _around.reset(token)
    # Inside, a gradient for a penalty may be scaled and unscaled by hand.
    if calls["scale_loss"] > calls["unscale_grads"]:
        warn(
            "The loss is scaled twice: `scale_loss` is called in a function that "
            "`value_and_grad` of this package differentiates. Leave out `scale_loss`."
        )


def note_number(scale: Any) -> None:
    """Note that a loss is scaled by a number, which may be the scale of any state."""
    use = _uses.get(scale) or _Use(_histories[None], set())
    _wait(use, "value_and_grad", None)
    _uses.put(scale, use)


def note_same_use(scale: jax.Array, new_state: Any) -> None:
    """Note that the scale of a new state was used as this scale was."""
    _uses.put(raw_scale_state(new_state).loss_scale, _uses.get(scale))


def note_true(grads: Any, scale: jax.Array, scaled_grads: Any = None) -> None:
    """Note that gradients have been divided by a scale.

    Leaves that ``scaled_grads`` also holds, such as integers, have not been divided.
    """
    unchanged = set(map(id, jax.tree.leaves(scaled_grads)))
    for x in jax.tree.leaves(grads):
        if id(x) not in unchanged:
            _true_grads.put(x, _uses.get(scale))


def warn_if_divided_twice(grads: Any) -> None:
    if _use_of(grads):
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return true gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def warn_if_forgotten(state: WithLossScalingState, rule: Any, grads: Any) -> None:
    """Warn at the update of a step whose loss was not scaled, or not unscaled."""
    use = _uses.get(state.scale_state.loss_scale)
    if use is None:
        # The scale may be kept beside the optimizer, for example one for each loss.
        other = _use_of(grads)
        is_bare = other is not None and other.history is _histories[None]
        use = other if is_bare and other.waits_as not in ("", "constant") else None
    if use is not None and use.waits_as:
        use.history.waiting -= collections.Counter([use.waits_as])
        use.waits_as = ""
    if getattr(rule, "loss_scale", None) == 1:  # it is fixed
        return
    history = _histories[_shapes_inside(state)]
    if use is None:
        _warn_if_not_scaled(history, rule)
    else:
        _warn_if_not_unscaled(use, history)


def _use_of(grads: Any) -> Any:
    """Return the use of the scale by which gradients were divided, if that is known."""
    return next(filter(None, map(_true_grads.get, jax.tree.leaves(grads))), None)


def _find_use(state: Any, by: str) -> tuple[LossScaleState, _Use]:
    raw = raw_scale_state(state)
    scale_state = check_state(raw)
    check_outermost(state)
    use = _uses.get(raw.loss_scale)
    if use is None:
        # In `shard_map`, shapes are those of a shard. The update may be outside.
        use = _Use(_histories[None if _is_sharded() else _shapes_inside(state)], set())
        for x in (raw.loss_scale, scale_state.loss_scale):
            _uses.put(x, use)
    if by == "unscale_grads" and not use.by:
        # Perhaps `scale_loss` was traced separately, with another object.
        is_any = use.history is _histories[None]
        for history in [*_histories.values()] if is_any else [use.history]:
            if history.waiting["scale_loss"] > 0:
                history.apart = True
                use.by |= {by, "update"} if is_any else set()
    for other, calls in _around.get():
        calls[by] += other is use
    _wait(use, by, _constant_scale(raw))
    return scale_state, use


def _wait(use: _Use, by: str, constant: float | None) -> None:
    """Note that the scale waits for its update, unless it was updated already."""
    if not use.waits_as and "update" not in use.by:
        use.waits_as = by
        if constant is not None:
            use.waits_as, use.history.constant = "constant", constant
        use.history.waiting[use.waits_as] += 1
    use.by.add(by)


def _constant_scale(state: LossScaleState) -> float | None:
    """Return a scale that should change, but is a constant of a compiled function."""
    if is_traced((state.loss_scale, state.is_fixed)) or not is_staging():
        return None
    scale, is_fixed = jax.device_get((state.loss_scale, state.is_fixed))
    return None if is_fixed else float(scale)


def _warn_if_not_unscaled(use: _Use, history: _History) -> None:
    """Warn at an update whose scale multiplied a loss, but divided no gradients."""
    use.by.add("update")
    if "value_and_grad" in use.by or use.by >= {"scale_loss", "unscale_grads"}:
        history.apart = False
    elif "scale_loss" not in use.by:  # the loss was scaled elsewhere
        history.waiting.clear()
    elif not history.apart:
        warn(
            "`scale_loss` has scaled a loss, but `unscale_grads` has divided no "
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )


def _warn_if_not_scaled(history: _History, rule: Any) -> None:
    """Warn at an update whose scale no function has used, as far as this file knows."""
    of_any = _histories[None]
    others = _histories.values() if _is_sharded() else [of_any]
    constants = [x.constant for x in (history, of_any) if x.waiting["constant"] > 0]
    for x in (history, *others):
        scaled = (+x.waiting).keys() - {"constant"}
        history.apart |= bool(scaled)
        if x is history:
            x.waiting.clear()
        elif scaled:  # take one only: another optimizer may wait for the others
            x.waiting -= collections.Counter([min(scaled)])
            break
    del of_any.waiting["constant"]
    if history.apart:
        return
    if constants:
        warn(
            f"The loss scale, {constants[0]:g}, is a constant of a compiled function, "
            "or of the body of a `scan`, because `state` is not one of its arguments. "
            "Whenever that runs again without being traced, it uses this scale. Once "
            "the scale overflows, every step is skipped. Call "
            "`value_and_grad(loss_fn, opt_state)` inside the compiled function, with "
            "the `opt_state` that is passed to it. If the scale should never change, "
            "use `FixedLossScale`."
        )
    else:
        warn(
            "No loss has been scaled for this optimizer state, whose rule is "
            f"{rule!r}. Write "
            "`loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, ...)` "
            "instead of `jax.value_and_grad(loss_fn)(params, ...)`, in the step, with "
            "the state of this step. If you multiply "
            "the loss yourself, use `ls.scale_loss` and `ls.unscale_grads`. If nothing "
            "should be scaled, pass the rule `FixedLossScale(1.0)`."
        )


def _is_sharded() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _shapes_inside(state: Any) -> Shapes | None:
    for x in find_nodes(state, WithLossScalingState).values():
        return tuple(map(np.shape, jax.tree.leaves(unwrap(x.inner_state))))
    return None
