"""What the conversions of saved states share."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._find import get_loss_scale_state
from .._rules.base import LossScale
from .._state import LossScaleState, check_state
from .._validation import check, check_concrete, describe
from ._build import Growing


class Form(NamedTuple):
    """What a system saves: behind each key, a field of the state or of the rule."""

    system: str
    source: str
    fields: Mapping[str, str]

    def read(self, saved: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the saved fields of the state, and the saved arguments."""
        if not isinstance(saved, Mapping):
            raise TypeError(
                f"`state_dict` must be a dictionary, got {describe(saved)}. "
                f"Pass {self.source}."
            )
        if set(saved) != set(self.fields):
            raise ValueError(
                f"`state_dict` must have the keys {sorted(self.fields)}, got "
                f"{sorted(map(str, saved))}. Pass {self.source}."
            )
        state, arguments = {}, {}
        for key, field in self.fields.items():
            name, number = f"state_dict[{key!r}]", _number(saved, key)
            if field not in LossScaleState._fields:
                arguments[key] = number
            elif field == "loss_scale":
                state[field] = check("saved_scale", number, name)
            else:
                state[field] = check("saved_count", number, name)
        return state, arguments

    def write(self, state: Any, rule: LossScale, **required: Any) -> dict[str, Any]:
        """Return what to save, as Python numbers, if the system can follow the rule."""
        scale_state = get_loss_scale_state(state)
        check_concrete("state", scale_state, "Convert it outside `jax.jit`.")
        check_state(scale_state)
        follow = f"for {self.system} to follow it, got {rule!r}. "
        follow += f"Start {self.system} anew at the scale `get_loss_scale(state)`."
        if not isinstance(rule, Growing):
            raise ValueError(f"`rule` must be a DynamicLossScale {follow}")
        quirks = {"first_growth_late": False, "clips_every_step": False}
        for name, value in {**quirks, "scale_dtype": "float32", **required}.items():
            if getattr(rule, name, value) != value:
                raise ValueError(f"`rule` must have {name}={value!r} {follow}")
        held = {**vars(rule), **scale_state._asdict()}
        return {key: np.asarray(held[x]).item() for key, x in self.fields.items()}


def restored(rule: LossScale, fields: Mapping[str, Any]) -> LossScaleState:
    """Return a rule's first state with the saved fields put in."""
    return rule.init()._replace(**jax.tree.map(jnp.asarray, arrays(fields)))


def arrays(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved numbers as arrays of shape (), float32 or int32."""
    return {
        key: np.asarray(x, np.float32 if isinstance(x, float) else np.int32)
        for key, x in numbers.items()
    }


def _number(saved: Mapping[str, Any], key: str) -> Any:
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
