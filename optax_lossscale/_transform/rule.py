"""Call the rule, keep the types of its state, and reject states of other rules."""

from typing import Any

import jax
import jax.numpy as jnp

from .._finite import AxisName
from .._jax_internals import varying_axes
from .._rules.base import LossScale
from .._rules.soundness import own_memory
from .._state import LossScaleState, check_single
from .._tree import same_structure
from .._validation import describe
from .types import as_before


def check_rule(loss_scale: Any) -> None:
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            "`loss_scale` must be a rule, an instance of LossScale, got "
            f"{describe(loss_scale)}. Pass one, such as "
            "`FixedLossScale(128.0)` or `DynamicLossScale(init_scale=128.0)`."
        )


def init_scale(rule: LossScale) -> LossScaleState:
    """Return the rule's first state, or raise if it is not one."""
    state: Any = rule.init()
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "`loss_scale` must have an `init` that returns a LossScaleState, got "
            f"{describe(state)} from {rule!r}. Return `LossScaleState.create(scale)`."
        )
    return check_single(state)


def check_agreement(
    apply: jax.Array, scale_state: LossScaleState, axis_name: AxisName | None
) -> None:
    """Raise if the devices of a ``shard_map`` could decide differently."""
    axes = varying_axes(apply) - varying_axes(scale_state.loss_scale)
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis along which gradients differ "
            "(with `check_updates`, parameters and state as well), here "
            f"{sorted(axes, key=str)}, got {axis_name!r}. Otherwise some devices would "
            "skip a step that others apply, and their states would drift apart. Add "
            "the axis, or average the gradients before `update`. If each device trains "
            "its own model, let its `scale_state` differ, too, with "
            "`jax.lax.pcast(scale_state, axis, to='varying')`."
        )


def update_scale(
    rule: Any, state: LossScaleState, *args: jax.typing.ArrayLike
) -> LossScaleState:
    """Return the rule's next state, in the structure and types of the given one."""
    state = check_single(state)
    if jax.tree.leaves(state.memory):
        state = own_memory(rule, state)
    try:
        new_state = rule.update(state, *args)
    except Exception as error:
        _check_own(rule, state, error)
        raise
    if not same_structure(new_state, state):
        _check_own(rule, state, None)
        raise ValueError(
            "`loss_scale` must have an `update` that keeps the structure of the "
            f"state, got {jax.tree.structure(new_state)} for "
            f"{jax.tree.structure(state)} from {rule!r}. Return "
            "`state.record(grads_finite)._replace(...)`."
        )
    for new, old in zip(
        jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True
    ):
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                "`loss_scale` must have an `update` that keeps the shapes of the "
                f"state, got {describe(new)} for {describe(old)} from {rule!r}. A "
                "scale and its counters are single numbers, so reduce arrays first."
            )
    # A user's rule may return a Python number for a counter.
    return jax.tree.map(as_before, new_state, state)


def _check_own(rule: LossScale, state: LossScaleState, cause: Exception | None) -> None:
    """Raise if a state belongs to another rule."""
    own = jax.eval_shape(rule.init)
    if not same_structure(state, own):
        raise ValueError(
            f"`state` must hold the state of {rule!r}, which has the fields "
            f"{jax.tree.structure(own)}, got {jax.tree.structure(state)}. To "
            "switch to another rule, start with its first state: "
            "`opt_state._replace(scale_state=rule.init())`."
        ) from cause
