"""Call the rule, hold it to its types, and refuse the states of other rules."""

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
            "`loss_scale` must be a rule, that is a LossScale, got "
            f"{describe(loss_scale)}. Pass an instance, such as "
            "`FixedLossScale(128.0)` or `DynamicLossScale(init_scale=128.0)`."
        )


def init_scale(rule: LossScale) -> LossScaleState:
    """Return the rule's first state, or say that it is none."""
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
    """Refuse decisions that differ between the devices of a ``shard_map``."""
    axes = varying_axes(apply) - varying_axes(scale_state.loss_scale)
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis along which gradients differ, or "
            "with `check_updates` parameters or state do, "
            f"here {sorted(axes, key=str)}, got {axis_name!r}. Else some devices "
            "would skip a step that others apply, and their states would drift apart. "
            "Add the axis, or average the gradients before `update`; where each "
            "device trains a model of its own, let its `scale_state` differ too, with "
            "`jax.lax.pcast(scale_state, axis, to='varying')`."
        )


def update_scale(
    rule: Any, state: LossScaleState, *args: jax.typing.ArrayLike
) -> LossScaleState:
    """Return the rule's next state, with the structure and the types of the first."""
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
            "`loss_scale` must have an `update` that returns states of one structure, "
            f"got {jax.tree.structure(new_state)} for {jax.tree.structure(state)} from "
            f"{rule!r}. Return `state.record(grads_finite)._replace(...)`."
        )
    for new, old in zip(
        jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True
    ):
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                "`loss_scale` must have an `update` that returns states of one shape, "
                f"got {describe(new)} for {describe(old)} from {rule!r}. A scale and "
                "its counters are single numbers: reduce what `update` is given."
            )
    # A user's rule may well return a Python number for a counter.
    return jax.tree.map(as_before, new_state, state)


def _check_own(rule: LossScale, state: LossScaleState, cause: Exception | None) -> None:
    """Refuse the state of a rule that remembers other things."""
    own = jax.eval_shape(rule.init)
    if not same_structure(state, own):
        raise ValueError(
            f"`state` must hold the state of {rule!r}, which has the fields "
            f"{jax.tree.structure(own)}, got {jax.tree.structure(state)}. To go on "
            "with another rule, start its scale afresh: "
            "`opt_state._replace(scale_state=rule.init())`."
        ) from cause
