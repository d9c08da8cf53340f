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
# as ``**locals()``, so a new preset needs rows for names that are not here.
_OURS = {
    "initial_scale": "init_scale",
    "initial_loss_scale": "init_scale",
    "init_loss_scale": "init_scale",
    "loss_scale": "init_scale",
    "loss_scaling": "init_scale",
    "scale": "init_scale",
    "scale_window": "growth_interval",
    "loss_scale_window": "growth_interval",
    "step_window": "growth_interval",
    "increment_period": "growth_interval",
    "period": "growth_interval",
    "dynamic_growth_steps": "growth_interval",
    "incr_every_n_steps": "growth_interval",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "delayed_shift": "hysteresis",
    "decr_every_n_nan_or_inf": "hysteresis",
    "scale_factor": "factor",
    "step_factor": "factor",
    "multiplier": "factor",
    "min_scale": "floor",
    "min_loss_scale": "floor",
    "min_loss_scaling": "floor",
    "minimum_scale": "floor",
    "scale_min": "floor",
    "threshold": "floor",
    "max_scale": "ceiling",
    "max_loss_scale": "ceiling",
    "scale_max": "ceiling",
    "log_max": "log_max_of_float16",
}


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
