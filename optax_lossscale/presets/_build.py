"""Build rules from other systems' arguments, with errors that use their names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._rules.dynamic import DynamicLossScale
from .._rules.verbatim import VerbatimLossScale
from .._validation import check, check_order

Growing = DynamicLossScale | VerbatimLossScale


def translated(theirs: Mapping[str, Any], names: str, **others: Any) -> dict[str, Any]:
    """Return another system's arguments under our names, checked under its names.

    ``names`` has our name of each argument, in order. A ``factor`` is that of growth
    and of backoff. A ``floor`` or a ``ceiling`` is a limit that may be beyond ours. The
    system has no arguments for ``others``.
    """
    called = dict(zip(names.split(), theirs, strict=True))
    ours = {name: check(name, theirs[their], their) for name, their in called.items()}
    if "factor" in ours:
        factor = ours.pop("factor")
        ours |= {"growth_factor": factor, "backoff_factor": 1 / factor}
    ours["min_scale"] = max(ours.pop("floor", SMALLEST_SCALE), SMALLEST_SCALE)
    ours["max_scale"] = min(ours.pop("ceiling", LARGEST_SCALE), LARGEST_SCALE)
    ours |= others
    limits = {"floor": "min_scale", "ceiling": "max_scale"}
    check_order(**{called.get(x, name): ours[name] for x, name in limits.items()})
    return ours


def growing(theirs: Mapping[str, Any], names: str, **others: Any) -> Growing:
    """Return a `DynamicLossScale` if that behaves alike, else a `VerbatimLossScale`."""
    rule = VerbatimLossScale(**translated(theirs, names, **others))
    late = rule.first_growth_late
    if late or not rule.min_scale <= rule.init_scale <= rule.max_scale:
        return rule
    fields = {field.name for field in dataclasses.fields(DynamicLossScale)}
    return DynamicLossScale(**{name: getattr(rule, name) for name in fields})
