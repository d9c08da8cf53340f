"""Arguments of rules and presets: how each is checked, under the name that users know.

Each function returns a plain Python value, or raises and says what the argument is.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from .._validation import check_count, check_factor, check_number, check_switch


def make_field(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return a field of a rule with the function that `check_fields` calls."""
    return dataclasses.field(default=default, metadata={"check": check})


def scale(name: str, value: Any) -> float:
    advice = "Beyond, the scale or its reciprocal is no normal float32 number."
    return check_number(name, value, SMALLEST_SCALE, LARGEST_SCALE, advice)


def constant_scale(name: str, value: Any) -> float:
    return check_number(name, value, 1, LARGEST_SCALE, "1 leaves the loss unchanged.")


def growth_factor(name: str, value: Any) -> float:
    advice = "It multiplies the scale if it grows; 2 is usual."
    return check_factor(name, value, 1, math.inf, advice)


def backoff_factor(name: str, value: Any) -> float:
    advice = "It multiplies the scale at overflow; 0.5 is usual."
    return check_factor(name, value, 0, 1, advice)


def growth_interval(name: str, value: Any) -> int:
    return check_count(
        name, value, "After so many finite steps in a row, the scale grows."
    )


def hysteresis(name: str, value: Any) -> int:
    return check_count(
        name, value, "After so many non-finite steps, the scale backs off."
    )


def refill(name: str, value: Any) -> str:
    if value not in ("finite", "growth", "change"):
        raise ValueError(
            f'`{name}` must be "finite", "growth" or "change", got {value!r}. It '
            "decides what resets the hysteresis counter."
        )
    return str(value)


def headroom(name: str, value: Any) -> float:
    advice = "It is how many octaves to leave free; 3 is usual."
    return check_number(name, value, 0, 126, advice)


def half_life(name: str, value: Any) -> int:
    return check_count(
        name, value, "After so many steps, the remembered maximum is half as large."
    )


def skip_nonfinite(name: str, value: Any) -> bool:
    return check_switch(name, value, "It decides whether to skip non-finite steps.")


def first_growth_late(name: str, value: Any) -> bool:
    return check_switch(
        name, value, "Only DeepSpeed needs it; leave it out in a new run."
    )
