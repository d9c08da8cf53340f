"""Remember how losses were scaled, and warn of one that was not, or twice.

A process remembers for optimizer states of which shapes a loss was scaled, and by what.
It does not count: a compiled function scales many losses, but is traced once.
"""

import collections
import contextvars
import weakref
from typing import Any

import jax

from ._find import find_nodes
from ._state import WithLossScalingState
from ._warn import warn

Shapes = tuple[tuple[int, ...], ...]

# The names of functions, by the shapes of the optimizer states that they were given. A
# scale without its optimizer, whose shapes are None, may be that of any.
SCALED: dict[Shapes | None, set[str]] = collections.defaultdict(set)

# Whether `value_and_grad` is calling a loss function.
differentiating = contextvars.ContextVar("differentiating", default=False)

_unscaled: list[weakref.ref[jax.Array]] = []  # a leaf of what `unscale_grads` returned


def note_scaled(state: Any, by: str) -> None:
    """Note that a function scales the loss of a state, or unscales its gradients."""
    SCALED[_shapes(state)].add(by)


def note_scale_loss(state: Any) -> None:
    """Note that `scale_loss` is called, and warn if the loss is scaled anyway."""
    if not differentiating.get():
        return note_scaled(state, "scale_loss")
    warn(
        "The loss is scaled twice: `scale_loss` is called in a function that "
        "`value_and_grad` of this package differentiates. Leave out `scale_loss`."
    )


def warn_if_unscaled(grads: Any, state: Any) -> None:
    """Warn if gradients that `unscale_grads` is given are true already."""
    shapes = _shapes(state)
    by_hand = {"scale_loss", "unscale_grads"} & (SCALED[shapes] | SCALED[None])
    again = any(x is ref() for x in jax.tree.leaves(grads) for ref in _unscaled)
    if again or shapes and "value_and_grad" in SCALED[shapes] and not by_hand:
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return true gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )


def note_unscaled(scaled_grads: Any, grads: Any, state: Any) -> None:
    note_scaled(state, "unscale_grads")
    pairs = zip(*map(jax.tree.leaves, (scaled_grads, grads)), strict=True)
    divided = [new for old, new in pairs if new is not old]
    _unscaled[:] = map(weakref.ref, divided[:1])


def warn_if_not_scaled(state: WithLossScalingState, rule: Any) -> None:
    """Warn of the first update of states of these shapes if no loss was scaled."""
    seen = SCALED[_shapes(state)] | SCALED[None]
    # In `shard_map`, shapes are those of a shard. The loss may be scaled outside.
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    if not seen and not mapped:
        warn(
            "No loss has been scaled for this optimizer state, whose rule is "
            f"{rule!r}. Write "
            "`loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, ...)` "
            "instead of `jax.value_and_grad(loss_fn)(params, ...)`. If you multiply "
            "the loss yourself, use `ls.scale_loss` and `ls.unscale_grads`. If nothing "
            "should be scaled, pass the rule `FixedLossScale(1.0)`."
        )
    elif seen == {"scale_loss"}:
        warn(
            "`scale_loss` has scaled a loss, but `unscale_grads` has divided no "
            "gradients. Call `grads = unscale_grads(grads, opt_state)` before `update`."
        )
    note_scaled(state, "update")


def _shapes(state: Any) -> Shapes | None:
    for x in find_nodes(state, WithLossScalingState).values():
        return tuple(getattr(y, "shape", ()) for y in jax.tree.leaves(x.inner_state))
    return None
