"""Find the loss scale in an optimizer state."""

from typing import Any

import jax
import optax

from ._state import LossScaleState

_HIDING = {
    optax.ApplyIfFiniteState: "`optax.apply_if_finite` hides overflows from the rule, "
    "which then never lowers the scale. Leave it out: `with_loss_scaling` skips those "
    "steps itself.",
    optax.MultiStepsState: "The sum in `optax.MultiSteps` keeps a NaN forever: all "
    "later steps are skipped. Wrap the other way round, as in "
    "`with_loss_scaling(optax.MultiSteps(optimizer, k))`.",
}


def get_loss_scale_state(state: Any) -> LossScaleState:
    """Return the one loss-scale state that a tree contains.

    Args:
        state: an optimizer state of any structure with one `LossScaleState` in it, or
            that state itself. What holds an optimizer state will do, such as a Flax
            ``TrainState`` or ``nnx.Optimizer``.

    Returns:
        The `LossScaleState`: the scale, its counters and whether the last step was
        applied, all as arrays on the device.

    Raises:
        ValueError: if there is none, or more than one.

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
            f"{type(state).__name__} without one. Was the optimizer wrapped with "
            "`with_loss_scaling`, and is this the state that its `init` returned?"
        )
    if len(found) > 1:
        raise ValueError(
            f"`state` must contain only one LossScaleState, got {len(found)}, at "
            f"{list(found)}. A loss is multiplied by one scale: pass the part of the "
            "state that belongs to it, or wrap the whole optimizer once."
        )
    (scale_state,) = found.values()
    return _unwrapped(scale_state)


def get_loss_scale(state: Any) -> jax.Array:
    """Return the loss scale that a tree contains.

    Args:
        state: as for `get_loss_scale_state`.

    Returns:
        The scale that multiplies the next loss, a float32 array of shape ``()``.

    Raises:
        ValueError: if there is no loss scale in the tree, or more than one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3))
        >>> ls.get_loss_scale(tx.init(jnp.zeros(3)))
        Array(32768., dtype=float32)
    """
    return get_loss_scale_state(state).loss_scale


def get_effective_loss_scale(state: Any) -> jax.Array:
    """Return the loss scale to multiply a loss by, if its rule is told what happens.

    Reading a scale is harmless; using one of which that is not true is not.
    """
    wrappers = tuple(_HIDING)
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, wrappers)):
        if isinstance(node, wrappers) and find_loss_scale_states(node):
            raise ValueError(
                "`state` must have the LossScaleState outside of other wrappers, got "
                f"one inside of {type(node).__name__}. {_HIDING[type(node)]}"
            )
    return get_loss_scale(state)


def find_loss_scale_states(tree: Any) -> dict[str, LossScaleState]:
    """Return every loss-scale state in a tree by its path, as ``keystr`` writes it."""

    def is_scale_state(node: Any) -> bool:
        return isinstance(node, LossScaleState)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scale_state)
    return {
        jax.tree_util.keystr(path): node
        for path, node in leaves
        if is_scale_state(node)
    }


def _unwrapped(node: Any) -> Any:
    """Return a state with its arrays alone: Flax NNX wraps each in a variable."""
    if isinstance(node, tuple):
        fields = [_unwrapped(field) for field in node]
        changed = any(new is not old for new, old in zip(fields, node, strict=True))
        return type(node)(*fields) if changed else node
    leaves = jax.tree.leaves(node)
    return leaves[0] if len(leaves) == 1 else node
