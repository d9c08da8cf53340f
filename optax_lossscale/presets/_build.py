"""Build a rule from another system's arguments, checked under that system's names."""

import dataclasses
from typing import Any

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._rules.arguments import check_growth_factor
from .._rules.dynamic import DynamicLossScale
from .._rules.verbatim import VerbatimLossScale
from .._validation import check_number

Growing = DynamicLossScale | VerbatimLossScale


def growing(
    *,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = LARGEST_SCALE,
    **arguments: Any,
) -> Growing:
    """Return a `DynamicLossScale`, if one takes the course that these arguments mean.

    For a quirk, or a first scale outside the limits, it is a `VerbatimLossScale`.
    """
    rule = VerbatimLossScale(min_scale=min_scale, max_scale=max_scale, **arguments)
    quirks = rule.first_growth_late or rule.scale_dtype != "float32"
    if quirks or not rule.min_scale <= rule.init_scale <= rule.max_scale:
        return rule
    names = {field.name for field in dataclasses.fields(DynamicLossScale)}
    return DynamicLossScale(**{name: getattr(rule, name) for name in names})


def factors(value: Any, name: str) -> dict[str, Any]:
    """Return the factors of a system that divides by what it multiplies by."""
    factor = check_growth_factor(value, name)
    return {"growth_factor": factor, "backoff_factor": 1 / factor}


def floor(value: Any, name: str) -> float:
    """Return a least scale, 2**-126 where another system goes down to less."""
    number = check_number(
        name,
        value,
        lambda x: 0 <= x <= LARGEST_SCALE,
        "a number from 0 to 2**126",
        "It is the least loss scale; 1 is usual.",
    )
    return max(number, SMALLEST_SCALE)


def ceiling(value: Any, name: str) -> float:
    """Return a largest scale, 2**126 where another system goes up to more."""
    number = check_number(
        name,
        value,
        lambda x: x >= SMALLEST_SCALE,
        "a number from 2**-126",
        "It is the largest loss scale; 2.0**24 is usual.",
    )
    return min(number, LARGEST_SCALE)
