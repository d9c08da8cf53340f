"""Build rules from the arguments of other systems, checked under their names."""

import dataclasses
from typing import Any

from .._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from .._rules.dynamic import DynamicLossScale
from .._rules.verbatim import VerbatimLossScale
from .._validation import check_number

Growing = DynamicLossScale | VerbatimLossScale


def least_scale(name: str, value: Any, largest: float = LARGEST_SCALE) -> float:
    """Return a smallest scale, which may be 0 in other systems."""
    advice = "It is the smallest loss scale; 1 is usual."
    return max(check_number(name, value, 0, largest, advice), SMALLEST_SCALE)


def build_rule(**arguments: Any) -> Growing:
    """Return a `DynamicLossScale` if that behaves alike, else a `VerbatimLossScale`.

    Without a ``backoff_factor``, the growth factor also divides the scale.
    """
    if "backoff_factor" not in arguments:
        arguments["backoff_factor"] = 1 / arguments.get("growth_factor", 2.0)
    rule = VerbatimLossScale(**arguments)
    late = rule.first_growth_late
    if late or not rule.min_scale <= rule.init_scale <= rule.max_scale:
        return rule
    names = {field.name for field in dataclasses.fields(DynamicLossScale)}
    return DynamicLossScale(**{name: getattr(rule, name) for name in names})
