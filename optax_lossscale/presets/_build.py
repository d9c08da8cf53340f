"""Build rules from other systems' arguments, with errors that use their names."""

import dataclasses
from typing import Any

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._rules.dynamic import DynamicLossScale
from .._rules.verbatim import VerbatimLossScale
from .._validation import check, check_order

Growing = DynamicLossScale | VerbatimLossScale

# What other systems call our arguments. A factor is that of growth and of backoff. A
# floor or a ceiling is a limit that may be beyond ours. Presets pass their arguments
# as ``**locals()``, so a new preset needs its names here.
_THEIRS = {
    "init_scale": "initial_scale initial_loss_scale init_loss_scale loss_scale "
    "loss_scaling scale",
    "growth_interval": "scale_window loss_scale_window step_window increment_period "
    "period dynamic_growth_steps incr_every_n_steps",
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "factor": "scale_factor step_factor multiplier",
    "hysteresis": "delayed_shift decr_every_n_nan_or_inf",
    "floor": "min_scale min_loss_scale min_loss_scaling minimum_scale scale_min "
    "threshold",
    "ceiling": "max_scale max_loss_scale scale_max",
    "log_max_of_float16": "log_max",
}
_OURS = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


def translated(**theirs: Any) -> dict[str, Any]:
    """Return another system's arguments under our names, checked under its names."""
    ours: dict[str, Any] = {}
    limits = {}
    for name, value in theirs.items():
        match _OURS.get(name, name):
            case "factor":
                factor = check("growth_factor", value, name)
                ours |= {"growth_factor": factor, "backoff_factor": 1 / factor}
            case "floor":
                limits[name] = max(check("floor", value, name), SMALLEST_SCALE)
                ours["min_scale"] = limits[name]
            case "ceiling":
                limits[name] = min(check("ceiling", value, name), LARGEST_SCALE)
                ours["max_scale"] = limits[name]
            case "consecutive_hysteresis":
                refill = "finite" if check(name, value) else "growth"
                ours["hysteresis_refill"] = refill
            case argument:
                ours[argument] = check(argument, value, name)
    check_order(**limits)  # systems name the smallest one first
    return ours


def growing(**theirs: Any) -> Growing:
    """Return the rule that these arguments ask for, by the names of any system.

    It is a `DynamicLossScale` if that behaves alike, otherwise a `VerbatimLossScale`.
    """
    rule = VerbatimLossScale(**translated(**theirs))
    quirks = rule.first_growth_late or rule.scale_dtype != "float32"
    if quirks or not rule.min_scale <= rule.init_scale <= rule.max_scale:
        return rule
    names = {field.name for field in dataclasses.fields(DynamicLossScale)}
    return DynamicLossScale(**{name: getattr(rule, name) for name in names})
