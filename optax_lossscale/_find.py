"""Find the loss scale in an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from ._jax_internals import is_in_jit
from ._precision import is_inexact
from ._state import LossScaleState, WithLossScalingState, check_state, in_own_types
from ._validation import describe
from ._warn import warn

_AROUND = "Put `with_loss_scaling` around it."
_UNCHECKED = f"It hides gradients from the check: a NaN in them is applied. {_AROUND}"
_MOVES = f"It changes the weights, or its own state, in a skipped step. {_AROUND}"
_HIDING: dict[type, tuple[str, str]] = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "It hides overflows from the rule, which then never lowers the scale. Remove "
        "it: `with_loss_scaling` skips these steps itself.",
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps",
        f"Its accumulator keeps a NaN forever, and no step is applied again. {_AROUND} "
        "If a trainer adds it, turn off the trainer's accumulation.",
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
    found = find_loss_scale_states(state)
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
    return in_own_types(_unwrapped(*found.values()))


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


def get_effective_state(state: Any) -> LossScaleState:
    """Return the state of the scale, or raise if a wrapper hides overflows from it."""
    for wrapper in find_nodes(state, tuple(_HIDING)).values():
        if _hides(wrapper, state):
            name, reason = _HIDING[type(wrapper)]
            raise ValueError(
                "`state` must have its LossScaleState outside other wrappers, got one "
                f"inside `{name}`. {reason}"
            )
    return check_state(get_loss_scale_state(state))


def scale_state_in_use(state: Any) -> LossScaleState:
    """Return the effective state, and warn if it is a constant of the program."""
    scale_state = get_effective_state(state)
    concrete = not any(isinstance(x, jax.core.Tracer) for x in scale_state[:-1])
    if concrete and is_in_jit() and not jax.device_get(scale_state.is_fixed):
        warn(
            f"The loss scale, {jax.device_get(scale_state.loss_scale):g}, is a "
            "constant of the function being compiled, because `state` is not one of "
            "its arguments. Once this scale overflows, every step is skipped. Call "
            "`value_and_grad(loss_fn, opt_state)` inside the compiled function, with "
            "the `opt_state` that is passed to it. If the scale should never change, "
            "use `FixedLossScale`."
        )
    _warn_of_moments_outside(state)
    return scale_state


def _warn_of_moments_outside(state: Any) -> None:
    """Warn if an optimizer is chained with `with_loss_scaling`, and not inside it."""

    def is_own(x: Any) -> bool:
        return isinstance(x, WithLossScalingState)

    def is_other(x: Any) -> bool:
        of_optax = isinstance(x, tuple) and type(x).__module__.startswith("optax.")
        observes = type(x).__name__ in ("MonitorState", "SnapshotState")
        return of_optax and not observes and not find_loss_scale_states(x)

    nodes = jax.tree.leaves_with_path(state, is_leaf=lambda x: is_own(x) or is_other(x))
    protected = [_shapes(x.inner_state) for _, x in nodes if is_own(x)]
    outside = [(path, x) for path, x in nodes if is_other(x) and _shapes(x)]
    for path, x in outside if protected else ():
        # Moments of other shapes belong to an optimizer of other parameters.
        if not protected[0] or _shapes(x) <= protected[0]:
            warn(
                f"`state` has a {type(x).__name__} at {jax.tree_util.keystr(path)}, "
                "outside `with_loss_scaling`, which cannot protect it: a skipped step "
                "changes the weights, or it keeps a NaN. Put the whole optimizer "
                "inside: `with_loss_scaling(optax.chain(...))`."
            )
            return


def _shapes(tree: Any) -> set[tuple[int, ...]]:
    return {x.shape for x in jax.tree.leaves(tree) if is_inexact(x) and jnp.ndim(x)}


def _hides(wrapper: Any, state: Any) -> bool:
    if not find_loss_scale_states(wrapper):
        return False
    if isinstance(wrapper, optax.PartitionState):
        groups = wrapper.inner_states.values()
        return not all(_is_set_to_zero(x) or find_loss_scale_states(x) for x in groups)
    if isinstance(wrapper, optax.MaskedState):
        # NaN gradients that are left out do no harm if the parameters are frozen.
        left_out = find_nodes(wrapper.inner_state, optax.MaskedNode)
        return bool(left_out) and not has_frozen(state)
    return True


def find_nodes(tree: Any, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the outermost nodes of a kind in a tree, keyed by their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return {jax.tree_util.keystr(path): x for path, x in leaves if isinstance(x, kind)}


def has_frozen(state: Any) -> bool:
    """Return whether an optimizer state freezes some of its parameters."""
    return any(map(_is_set_to_zero, find_nodes(state, optax.MaskedState).values()))


def _is_set_to_zero(state: Any) -> bool:
    is_masked = isinstance(state, optax.MaskedState)
    return is_masked and isinstance(state.inner_state, optax.EmptyState)


def find_loss_scale_states(tree: Any) -> dict[str, LossScaleState]:
    return find_nodes(tree, LossScaleState)


def replace_loss_scale_state(state: Any, new: LossScaleState) -> Any:
    def leaf(x: Any) -> Any:
        if not isinstance(x, LossScaleState):
            return x
        # Flax NNX wraps each array in a variable, so keep the structure.
        return jax.tree.unflatten(jax.tree.structure(x), jax.tree.leaves(new))

    return jax.tree.map(leaf, state, is_leaf=lambda x: isinstance(x, LossScaleState))


def _unwrapped(state: Any) -> Any:
    """Take the arrays of a state out of the variables that Flax NNX wraps them in."""

    def array(x: Any) -> Any:
        leaves = jax.tree.leaves(x)
        return leaves[0] if len(leaves) == 1 else x

    return jax.tree.map(array, state, is_leaf=lambda x: not isinstance(x, tuple))


def _advice(state: Any) -> str:
    if isinstance(state, optax.GradientTransformation):
        return "It is the optimizer: pass what its `init(params)` returns."
    if callable(getattr(state, "init", None)):
        return "It is not a state yet: pass what its `init()` returns."
    return (
        "Was the optimizer wrapped with `with_loss_scaling`, and is this the state "
        "that its `init` returned?"
    )
