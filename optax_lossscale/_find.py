"""Find the loss scale in an optimizer state."""

import warnings
from typing import Any

import jax
import optax
import optax.contrib

from ._jax_internals import is_in_jit
from ._state import LossScaleState, canonical, check_state

_AROUND = "Put `with_loss_scaling` around it."
_UNCHECKED = (
    f"It hides gradients from the check, so a NaN in them is applied. {_AROUND}"
)
_MOVES = f"It changes the weights, or its own state, in a skipped step. {_AROUND}"
_HIDING: dict[type, tuple[str, str]] = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "It hides overflows from the rule, which then never lowers the scale. Remove "
        "it: `with_loss_scaling` skips these steps itself.",
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps",
        f"Its accumulator keeps a NaN forever, and no step is applied again. {_AROUND}",
    ),
    optax.MaskedState: ("optax.masked", _UNCHECKED),
    optax.PartitionState: ("optax.partition", _UNCHECKED),
    optax.ConditionallyMaskState: ("optax.conditionally_mask", _UNCHECKED),
    optax.ConditionallyTransformState: ("optax.conditionally_transform", _UNCHECKED),
    optax.LookaheadState: ("optax.lookahead", _MOVES),
    optax.contrib.ScheduleFreeState: ("optax.contrib.schedule_free", _MOVES),
    optax.contrib.MechanicState: ("optax.contrib.mechanize", _MOVES),
    optax.contrib.SAMState: ("optax.contrib.sam", _MOVES),
}


def get_loss_scale_state(state: Any) -> LossScaleState:
    """Return the `LossScaleState` of an optimizer state.

    Use it to log the counters, for example how many steps were skipped. It finds the
    state at any depth, for example in the state of ``optax.chain``.

    Args:
        state: an optimizer state of any structure that contains one `LossScaleState`,
            or that state itself. It may be anything that holds an optimizer state, such
            as a Flax ``TrainState`` or ``nnx.Optimizer``.

    Returns:
        The `LossScaleState`: the scale, its counters, and whether the last step was
        applied. All of them are arrays on the device.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> scaled = ls.with_loss_scaling(optax.adam(1e-3))
        >>> tx = optax.chain(optax.clip_by_global_norm(1.0), scaled)
        >>> opt_state = tx.init({"w": jnp.zeros(3)})
        >>> bool(ls.get_loss_scale_state(opt_state).grads_finite)
        True
    """
    found = find_loss_scale_states(state)
    if not found:
        raise ValueError(
            "`state` must contain a LossScaleState, got a "
            f"{type(state).__name__} without one. {_advice(state)}"
        )
    if len(found) > 1:
        raise ValueError(
            f"`state` must contain only one LossScaleState, got {len(found)}, at "
            f"{list(found)}. A loss is multiplied by one scale. Pass the part of the "
            "state that belongs to this loss, or wrap the whole optimizer once."
        )
    (scale_state,) = found.values()
    return canonical(_unwrapped(scale_state))


def get_loss_scale(state: Any) -> jax.Array:
    """Return the loss scale of an optimizer state, for example to log it.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.

    Returns:
        The scale that multiplies the next loss, a float32 array of shape ``()``.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3))
        >>> ls.get_loss_scale(tx.init(jnp.zeros(3)))
        Array(32768., dtype=float32)
    """
    return get_loss_scale_state(state).loss_scale


def get_effective_state(state: Any) -> LossScaleState:
    """Return the loss-scale state, or raise if a wrapper hides overflows from its rule.

    Functions that multiply or divide by the scale call this. Reading the scale is
    harmless, so `get_loss_scale_state` does not check for wrappers.
    """
    wrappers = tuple(_HIDING)
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, wrappers)):
        if isinstance(node, wrappers) and _hides(node, state):
            name, reason = next(v for k, v in _HIDING.items() if isinstance(node, k))
            raise ValueError(
                "`state` must have its LossScaleState outside other wrappers, got one "
                f"inside `{name}`. {reason}"
            )
    return check_state(get_loss_scale_state(state))


def _hides(node: Any, state: Any) -> bool:
    """Return whether a wrapper hides gradients or overflows from the rule."""
    if not find_loss_scale_states(node):
        return False
    if isinstance(node, optax.PartitionState):
        groups = node.inner_states.values()
        others = [x for x in groups if not find_loss_scale_states(x)]
        return not all(map(_is_frozen, others))
    if isinstance(node, optax.MaskedState):
        # NaN gradients that are left out do no harm if the parameters are frozen.
        left_out = _nodes(node.inner_state, optax.MaskedNode)
        frozen = any(map(_is_frozen, _nodes(state, optax.MaskedState)))
        return bool(left_out) and not frozen
    return True


def _nodes(tree: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def _is_frozen(state: Any) -> bool:
    """Return whether this is the state of a masked ``optax.set_to_zero``."""
    return isinstance(state, optax.MaskedState) and isinstance(
        state.inner_state, optax.EmptyState
    )


def warn_if_constant(state: LossScaleState) -> None:
    """Warn if a scale that its rule changes is a constant of the program."""
    concrete = not any(isinstance(x, jax.core.Tracer) for x in state[:6])
    if concrete and is_in_jit() and jax.device_get(state.hysteresis_tracker) >= 0:
        warnings.warn(
            f"The loss scale, {jax.device_get(state.loss_scale):g}, is a constant of "
            "the function being compiled, because `state` is not one of its arguments. "
            "The function keeps this scale when the rule changes it. Once this scale "
            "overflows, every step is skipped. Call `value_and_grad(loss_fn, "
            "opt_state)` inside the compiled function, with the `opt_state` that is "
            "passed to it. If the scale should never change, use `FixedLossScale`.",
            stacklevel=3,
        )


def find_loss_scale_states(tree: Any) -> dict[str, LossScaleState]:
    """Return every loss-scale state in a tree, keyed by its path as a string."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_scale_state)
    return {
        jax.tree_util.keystr(path): node
        for path, node in leaves
        if _is_scale_state(node)
    }


def replace_loss_scale_state(state: Any, new: LossScaleState) -> Any:
    """Replace the loss-scale state of a tree."""

    def replaced(node: Any) -> Any:
        if not _is_scale_state(node):
            return node
        # Flax NNX wraps each array in a variable, so keep the structure.
        return jax.tree.unflatten(jax.tree.structure(node), jax.tree.leaves(new))

    return jax.tree.map(replaced, state, is_leaf=_is_scale_state)


def _is_scale_state(node: Any) -> bool:
    return isinstance(node, LossScaleState)


def _unwrapped(node: Any) -> Any:
    """Take the arrays of a state out of the variables that Flax NNX wraps them in."""
    if isinstance(node, tuple):
        fields = [_unwrapped(field) for field in node]
        changed = any(new is not old for new, old in zip(fields, node, strict=True))
        return type(node)(*fields) if changed else node
    leaves = jax.tree.leaves(node)
    return leaves[0] if len(leaves) == 1 else node


def _advice(state: Any) -> str:
    if isinstance(state, optax.GradientTransformation):
        return "It is the optimizer: pass what its `init(params)` returns."
    if callable(getattr(state, "init", None)):
        return "It is not a state yet: pass what its `init()` returns."
    return (
        "Was the optimizer wrapped with `with_loss_scaling`, and is this the state "
        "that its `init` returned?"
    )
