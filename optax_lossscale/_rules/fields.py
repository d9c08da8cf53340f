"""The fields of rules: how each is checked, and what an error says of it."""

import dataclasses
import functools
import math
from typing import Any

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from .._validation import (
    check_choice,
    check_count,
    check_dtype,
    check_number,
    check_order,
    check_switch,
)

_NORMAL = "Beyond, the scale or its reciprocal is no normal float32 number."
_SCALE = check_number, SMALLEST_SCALE, LARGEST_SCALE, _NORMAL
_OPEN = functools.partial(check_number, is_open=True)
_REFILLS = ("finite", "growth", "change")

# Each check takes the name, the value and the rest of the row. It returns a plain
# Python value, or raises.
_CHECKS: dict[str, Any] = {
    "loss_scale": (check_number, 1, LARGEST_SCALE, "1 leaves the loss unchanged."),
    "init_scale": _SCALE,
    "min_scale": _SCALE,
    "max_scale": _SCALE,
    "growth_factor": (_OPEN, 1, math.inf, "It multiplies a scale that grows, as 2."),
    "backoff_factor": (_OPEN, 0, 1, "It multiplies the scale at overflow, as 0.5."),
    "growth_interval": (check_count, "It is the finite steps in a row to a growth."),
    "hysteresis": (check_count, "It is the non-finite steps to a backoff."),
    "hysteresis_refill": (
        check_choice,
        _REFILLS,
        "It decides what resets the hysteresis counter.",
    ),
    "headroom": (check_number, 0, 126, "It is the powers of two to leave free, as 3."),
    "half_life": (check_count, "It is the steps in which a maximum decays to a half."),
    "dtype": (check_dtype,),
    "skip_nonfinite": (check_switch, "It decides whether to skip non-finite steps."),
}


def check_field(name: str, value: Any) -> Any:
    """Return the value of a field of this name as a plain Python value, or raise."""
    check, *others = _CHECKS[name]
    return check(name, value, *others)


def check_fields(rule: Any) -> None:
    """Check the fields of a frozen rule, and that its limits ascend."""
    for field in dataclasses.fields(rule):
        value = check_field(field.name, getattr(rule, field.name))
        object.__setattr__(rule, field.name, value)
    limits = ("min_scale", "init_scale", "max_scale")
    check_order(**{x: getattr(rule, x) for x in limits if hasattr(rule, x)})
