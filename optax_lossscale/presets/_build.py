"""Build rules from other systems' arguments, with errors that use their names."""

import dataclasses
from typing import Any

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._rules.dynamic import DynamicLossScale
from .._rules.verbatim import VerbatimLossScale
from .._validation import check, check_number

Growing = DynamicLossScale | VerbatimLossScale


def growing(
    *,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = LARGEST_SCALE,
    **arguments: Any,
) -> Growing:
    """Return a `DynamicLossScale`, if one behaves as these arguments ask.

    With a quirk, or a first scale outside the limits, return a `VerbatimLossScale`.
    """
    rule = VerbatimLossScale(min_scale=min_scale, max_scale=max_scale, **arguments)
    quirks = rule.first_growth_late or rule.scale_dtype != "float32"
    if quirks or not rule.min_scale <= rule.init_scale <= rule.max_scale:
        return rule
    names = {field.name for field in dataclasses.fields(DynamicLossScale)}
    return DynamicLossScale(**{name: getattr(rule, name) for name in names})


def factors(value: Any, name: str) -> dict[str, Any]:
    """Return both factors of a system that multiplies and divides by the same one."""
    factor = check("growth_factor", value, name)
    return {"growth_factor": factor, "backoff_factor": 1 / factor}


def floor(value: Any, name: str) -> float:
    """Return a smallest scale, raised to 2**-126 if another system goes lower."""
    number = check_number(
        name,
        value,
        lambda x: 0 <= x <= LARGEST_SCALE,
        "a number from 0 to 2**126",
        "It is the smallest loss scale; 1 is usual.",
    )
    return max(number, SMALLEST_SCALE)


def ceiling(value: Any, name: str) -> float:
    """Return a largest scale, lowered to 2**126 if another system goes higher."""
    number = check_number(
        name,
        value,
        lambda x: x >= SMALLEST_SCALE,
        "a number from 2**-126",
        "It is the largest loss scale; 2.0**24 is usual.",
    )
    return min(number, LARGEST_SCALE)
