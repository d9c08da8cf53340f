"""Find the loss scale in an optimizer state, by its type."""

from typing import Any, cast

import jax
import optax

from ._flax_internals.nnx_objects import unwrap
from ._state import LossScaleState, WithLossScalingState, canonical
from ._tree import is_array
from ._validation import describe

# The state of an optimizer, or an object that has one: see `find_state`.
State = Any
_STATES = (WithLossScalingState, LossScaleState)


def get_loss_scale_state(state: Any) -> LossScaleState:
    """Return the loss scale and its counters from an optimizer state, to log them.

    Args:
        state: the optimizer state of `with_loss_scaling` or `skip_nonfinite`, a
            `LossScaleState`, or an object whose ``opt_state`` is one of these, such as
            Flax's ``TrainState`` and ``nnx.Optimizer``.

    Returns:
        The `LossScaleState`, with arrays on the device.

    Raises:
        ValueError: if ``state`` is anything else, such as the state of a chain around
            the wrapper. Such a chain could change the updates of a skipped step.

    Examples:
        >>> import optax
        >>> import optax_lossscale as ls
        >>> opt_state = ls.with_loss_scaling(optax.adam(1e-3)).init({})
        >>> int(ls.get_loss_scale_state(opt_state).skipped_steps)
        0
    """
    return canonical(raw_scale_state(find_state(state)))


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


def find_state(
    state: State, call: str = "", name: str = "state"
) -> WithLossScalingState | LossScaleState:
    """Return a state, or the ``opt_state`` of an object that has one, or raise.

    An error names the argument and, if it is given, the right ``call``.
    """
    found = state
    # The state of `optax.contrib.sam` has a field `opt_state`, but is no train state.
    if not (isinstance(state, _STATES) or type(state).__module__.startswith("optax.")):
        found = getattr(state, "opt_state", state)
    if isinstance(found, _STATES):
        return found
    raise ValueError(
        f"`{name}` must be what the `init(params)` of `with_loss_scaling` or "
        "`skip_nonfinite` returned, a LossScaleState, or an object whose `opt_state` "
        f"is one of these, got {describe(found)}. {_advice(found)}"
        f"{f' The call is `{call}`.' if call else ''}"
    )


def raw_scale_state(found: WithLossScalingState | LossScaleState) -> LossScaleState:
    """Return the `LossScaleState` of an optimizer state, with its own array objects."""
    # Flax NNX wraps each array in a variable.
    return cast(LossScaleState, unwrap(_scale_state(found)))


def replace_loss_scale_state(state: State, new: LossScaleState) -> State:
    """Return the state, or the object with an ``opt_state``, with another scale."""
    old = _scale_state(find_state(state))
    # Flax NNX wraps each array in a variable, so keep the structure.
    new = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
    replaced = jax.tree.map(
        lambda x: new if x is old else x, state, is_leaf=lambda x: x is old
    )
    if _scale_state(find_state(replaced)) is not new:
        raise TypeError(
            "`state` must be a pytree that holds its `opt_state` if the scale may "
            f"change, got {describe(state)}. Pass its `opt_state`."
        )
    return replaced


def find_nodes(tree: Any, kind: type) -> list[Any]:
    """Return the outermost nodes of a kind in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def _scale_state(found: WithLossScalingState | LossScaleState) -> LossScaleState:
    return found.scale_state if isinstance(found, WithLossScalingState) else found


def _advice(found: Any) -> str:
    if isinstance(found, optax.GradientTransformation):
        return "It is the optimizer: pass the result of its `init(params)`."
    if callable(getattr(found, "init", None)):
        return "It is not a state yet: pass the result of its `init()`."
    if is_array(found):
        return "The state of a scale of 1024 is `FixedLossScale(1024.0).init()`."
    # A chain's state is a tuple of named ones; in optax 0.2.5, a named chain's a dict.
    named = [hasattr(x, "_fields") for x in found] if isinstance(found, tuple) else []
    put = "Put"
    if named == [False, True] and isinstance(found[1], _STATES):
        put = "If `update` returned it, pass the second of the two. Else put"
    elif type(found) in (dict, list, tuple) and not any(named):
        put = (
            "If it was restored from a checkpoint, pass `init(params)` to the "
            "checkpointer as the target, so that it keeps its classes. Else put"
        )
    rest = "If a trainer adds `optax.MultiSteps`, turn off its accumulation."
    if not find_nodes(found, LossScaleState):
        rest = "To continue from the state of the unwrapped optimizer, use "
        rest += "`init(params)._replace(inner_state=...)`."
    return (
        f"{put} `with_loss_scaling` or `skip_nonfinite` around the whole optimizer, as "
        f"in `skip_nonfinite(optax.chain(...))`. {rest}"
    )
