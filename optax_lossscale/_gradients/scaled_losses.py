"""Remember how losses were scaled, and warn of one that was not, or twice.

A process remembers for optimizer states of which shapes a loss was scaled, and by what.
It does not count: a compiled function scales many losses, but is traced once.
"""

import collections
import contextvars
import weakref
from typing import Any

import jax
import numpy as np

from .._find import find_nodes
from .._state import WithLossScalingState
from .._validation import warn

Shapes = tuple[tuple[int, ...], ...]

# The names of functions, by the shapes of the optimizer states that they were given. A
# scale without its optimizer, whose shapes are None, may be that of any.
SCALED: dict[Shapes | None, set[str]] = collections.defaultdict(set)

# Whether `value_and_grad` is calling a loss function.
differentiating = contextvars.ContextVar("differentiating", default=False)

_unscaled: list[weakref.ref[jax.Array]] = []  # a leaf of what `unscale_grads` returned


def note_scaled(state: Any, by: str) -> None:
    """Note that a function scales the loss of a state."""
    SCALED[_shapes_inside(state)].add(by)


def note_scale_loss(state: Any) -> None:
    """Note that `scale_loss` is called, and warn if the loss is scaled anyway."""
    if not differentiating.get():
        return note_scaled(state, "scale_loss")
    warn(
        "The loss is scaled twice: `scale_loss` is called in a function that "
        "`value_and_grad` of this package differentiates. Leave out `scale_loss`."
    )


def note_unscale_grads(scaled_grads: Any, grads: Any, state: Any) -> None:
    """Note what `unscale_grads` has divided, and warn if it was true already."""
    shapes = _shapes_inside(state)
    by_hand = {"scale_loss", "unscale_grads"} & (SCALED[shapes] | SCALED[None])
    old, new = map(jax.tree.leaves, (scaled_grads, grads))
    again = any(x is ref() for x in old for ref in _unscaled)
    if again or shapes and "value_and_grad" in SCALED[shapes] and not by_hand:
        warn(
            "The gradients are divided by the loss scale twice: `value_and_grad`, "
            "`scale_backward` and `unscale_grads` return true gradients, ready for "
            "clipping and for `update`. Leave out this `unscale_grads`."
        )
    SCALED[shapes].add("unscale_grads")
    divided = [y for x, y in zip(old, new, strict=True) if x is not y]
    _unscaled[:] = map(weakref.ref, divided[:1])


def warn_if_not_scaled(state: WithLossScalingState, rule: Any) -> None:
    """Warn of the first update of states of these shapes if no loss was scaled."""
    if getattr(rule, "loss_scale", None) == 1:  # it is fixed
        return
    noted = SCALED[_shapes_inside(state)]
    seen = noted | SCALED[None]
    # In `shard_map`, shapes are those of a shard. The loss may be scaled outside.
    if not seen and not jax.sharding.get_abstract_mesh().manual_axes:
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
    noted.add("update")


def _shapes_inside(state: Any) -> Shapes | None:
    for x in find_nodes(state, WithLossScalingState).values():
        return tuple(map(np.shape, jax.tree.leaves(x.inner_state)))
    return None
