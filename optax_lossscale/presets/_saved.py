"""Code that the conversions of saved states share."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._find import get_loss_scale_state
from .._rules.base import LossScale
from .._state import LossScaleState
from .._validation import check_count, check_normal_scale, describe
from ._build import Growing


def check_keys(saved: Any, keys: Sequence[str], source: str) -> None:
    """Check that a saved state has exactly the keys of its system."""
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"`state_dict` must be a dictionary, got {describe(saved)}. Pass {source}."
        )
    if set(saved) != set(keys):
        raise ValueError(
            f"`state_dict` must have the keys {sorted(keys)}, got "
            f"{sorted(map(str, saved))}. Pass {source}."
        )


def read_scale(saved: Mapping[str, Any], key: str) -> float:
    """Return a saved scale, or raise if no run could recover from it."""
    return check_normal_scale(
        f"state_dict[{key!r}]",
        read_number(saved, key),
        "Gradients do not survive division by a scale outside this range. Start from a "
        "fresh state: `rule.init()`.",
    )


def read_count(saved: Mapping[str, Any], key: str) -> int:
    name, number = f"state_dict[{key!r}]", read_number(saved, key)
    least = int(np.iinfo(np.int32).min)
    return check_count(name, number, "It counts steps.", least)


def read_number(saved: Mapping[str, Any], key: str) -> Any:
    """Return a saved number as a Python number, without checking its value."""
    value = saved[key]
    # One element, of any shape and library.
    if hasattr(value, "item") and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(
            f"`state_dict[{key!r}]` must be one number, got {describe(saved[key])}. "
            "Pass it as it was saved: a number, or an array of one element."
        )
    return value


def restored(rule: LossScale, **fields: float) -> LossScaleState:
    """Return a rule's first state with the saved values put in."""
    state = rule.init()
    arrays = {
        name: jnp.asarray(value, getattr(state, name).dtype)
        for name, value in fields.items()
    }
    return state._replace(**arrays)


def check_follows(rule: LossScale, system: str, **fields: Any) -> Growing:
    """Check that another system can continue with a rule."""
    if not isinstance(rule, Growing):
        raise ValueError(
            f"`rule` must be a DynamicLossScale for {system} to follow it, got "
            f"{rule!r}. Start {system} anew at the scale `get_loss_scale(state)`."
        )
    quirks = {"first_growth_late": False, "clips_every_step": False, **fields}
    for name, value in quirks.items():
        if getattr(rule, name, value) != value:
            raise ValueError(
                f"`rule` must have {name}={value!r} for {system} to follow it, got "
                f"{rule!r}. Start {system} anew at the scale `get_loss_scale(state)`."
            )
    return rule


def numbers(state: Any) -> tuple[float, int, int]:
    """Return the scale, the growth tracker and the hysteresis tracker."""
    scale_state = get_loss_scale_state(state)
    return (
        float(scale_state.loss_scale),
        int(scale_state.growth_tracker),
        int(scale_state.hysteresis_tracker),
    )
