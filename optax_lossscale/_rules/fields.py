"""The fields of rules and their checks."""

import functools
import math
from typing import Any

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from .._validation import (
    check_choice,
    check_count,
    check_dtype,
    check_number,
    check_switch,
)

_BEYOND = "Outside, the scale or its reciprocal is not a normal float32 value."
_LIMIT = check_number, SMALLEST_SCALE, LARGEST_SCALE, _BEYOND
_REFILLS = "finite", "growth", "change"
_check_inside = functools.partial(check_number, is_open=True)
# The fields of rules: each check, and its arguments after the name and the value.
_CHECKS: dict[str, tuple[Any, ...]] = {
    "loss_scale": (
        check_number,
        1,
        LARGEST_SCALE,
        "1 leaves the loss unchanged. For lower scales, use `DynamicLossScale`.",
    ),
    "init_scale": _LIMIT,
    "min_scale": _LIMIT,
    "max_scale": _LIMIT,
    "growth_factor": (_check_inside, 1, math.inf, "It multiplies a scale that grows."),
    "backoff_factor": (_check_inside, 0, 1, "It multiplies the scale at overflow."),
    "growth_interval": (
        check_count,
        "The scale grows after this many finite steps in a row.",
    ),
    "hysteresis": (check_count, "The scale falls after this many non-finite steps."),
    "hysteresis_refill": (
        check_choice,
        _REFILLS,
        "This event resets the hysteresis counter.",
    ),
    "headroom": (check_number, 0, 126, "It is how many powers of two to leave free."),
    "half_life": (check_count, "A remembered maximum halves in this many steps."),
    "dtype": (check_dtype,),
    "skip_nonfinite": (check_switch, "It decides whether to skip non-finite steps."),
}


def check_field(field: str, value: Any, name: str = "") -> Any:
    """Return a field of a rule, which the user calls ``name``, as a Python value."""
    if field not in _CHECKS:
        raise KeyError(f"`{field}` has no check. Add one to `_CHECKS` in {__file__}.")
    check, *arguments = _CHECKS[field]
    return check(name or field, value, *arguments)
