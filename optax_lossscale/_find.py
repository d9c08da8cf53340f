"""Find the loss scale in an optimizer state."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import optax

from ._flax_internals import unwrap
from ._state import (
    LossScaleState,
    WithLossScalingState,
    canonical,
)
from ._validation import describe

# The types of a chain's state. In optax 0.2.5, that of a named chain is a dict.
CHAINS = (tuple, collections.OrderedDict)
_NAMED_CHAIN = type(optax.named_chain(("", optax.identity())).init(()))

# Types that may contain a state of `with_loss_scaling`. So may any object with an
# attribute ``opt_state``, such as Flax's `TrainState` and `nnx.Optimizer`.
_CONTAINERS = (WithLossScalingState, optax.InjectStatefulHyperparamsState, list, dict)


def get_loss_scale_state(state: Any) -> LossScaleState:
    """Return the `LossScaleState` of an optimizer state, for example to log counters.

    Args:
        state: an optimizer state that contains one `LossScaleState` at any depth, that
            state itself, or a Flax ``TrainState`` or ``nnx.Optimizer``.

    Returns:
        The `LossScaleState`, with arrays on the device.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> state = {"step": 0, "opt_state": ls.DynamicLossScale().init()}
        >>> int(ls.get_loss_scale_state(state).skipped_steps)
        0
    """
    return canonical(raw_scale_state(state))


def get_loss_scale(state: Any) -> jax.Array:
    """Return the loss scale of an optimizer state, for example to log it.

    Args:
        state: the state, as for `get_loss_scale_state`.

    Returns:
        The scale that multiplies the next loss, a float32 array of shape ``()``.

    Raises:
        ValueError: as `get_loss_scale_state`.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.get_loss_scale(ls.DynamicLossScale().init())
        Array(32768., dtype=float32)
    """
    return get_loss_scale_state(state).loss_scale


def raw_scale_state(state: Any) -> LossScaleState:
    """Return the `LossScaleState` of an optimizer state, with its own array objects."""
    found = find_nodes(state, LossScaleState)
    if not found:
        raise ValueError(
            f"`state` must contain a LossScaleState, got {describe(state)} without "
            f"one. {_advice(state)}"
        )
    if len(found) > 1:
        raise ValueError(
            f"`state` must contain only one LossScaleState, got {len(found)}, at "
            f"{list(found)}. A loss is multiplied by one scale. Pass the part of the "
            "state that belongs to this loss, or wrap the whole optimizer once."
        )
    (scale_state,) = map(unwrap, found.values())
    return scale_state


def check_outermost(state: Any) -> None:
    """Raise if a transformation of Optax is around `with_loss_scaling` or beside it."""
    if isinstance(state, LossScaleState):
        return
    children = jax.tree.leaves(state, is_leaf=lambda x: x is not state)
    outside = []
    if type(state) in (*CHAINS, _NAMED_CHAIN):
        scaling = [bool(find_nodes(x, LossScaleState)) for x in children]
        pairs = zip(children, scaling, strict=True)
        outside = [
            node for x, is_in in pairs if not is_in for node in find_transforming(x)
        ]
    elif _is_of_optax(state) or not hasattr(state, "opt_state"):
        outside = [] if isinstance(state, _CONTAINERS) else [state]
    if outside:
        raise ValueError(
            "`state` must have its loss scale outside of all optimizers, got a "
            f"{type(outside[0]).__name__} around it or chained with it. Before the "
            "check it may hide inf and NaN, and after it a skipped step would change "
            "the weights. Put `with_loss_scaling` around the whole optimizer, as in "
            "`with_loss_scaling(optax.chain(...))`. If a trainer adds "
            "`optax.MultiSteps`, turn off its accumulation. Of a state of your own, "
            "pass the part that `init(params)` returned."
        )
    for x in children:
        if find_nodes(x, LossScaleState):
            check_outermost(x)


def find_transforming(member: Any) -> Iterator[Any]:
    """Yield the Optax states in a member of a chain, but not those of observers."""
    for node in jax.tree.leaves(member, is_leaf=_is_of_optax):
        observes = type(node).__name__ in ("MonitorState", "SnapshotState")
        if _is_of_optax(node) and not observes:
            yield node


def _is_of_optax(node: Any) -> bool:
    return type(node).__module__.startswith("optax.")


def find_nodes(tree: Any, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the outermost nodes of a kind in a tree, keyed by their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return {jax.tree_util.keystr(path): x for path, x in leaves if isinstance(x, kind)}


def replace_loss_scale_state(state: Any, new: LossScaleState) -> Any:
    def leaf(x: Any) -> Any:
        if not isinstance(x, LossScaleState):
            return x
        # Flax NNX wraps each array in a variable, so keep the structure.
        return jax.tree.unflatten(jax.tree.structure(x), jax.tree.leaves(new))

    return jax.tree.map(leaf, state, is_leaf=lambda x: isinstance(x, LossScaleState))


def _advice(state: Any) -> str:
    if isinstance(state, optax.GradientTransformation):
        return "It is the optimizer: pass what its `init(params)` returns."
    if callable(getattr(state, "init", None)):
        return "It is not a state yet: pass what its `init()` returns."
    return (
        "Was the optimizer wrapped with `with_loss_scaling`, and is this the state "
        "that its `init` returned?"
    )
