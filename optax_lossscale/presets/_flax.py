"""Flax: ``flax.training.dynamic_scale.DynamicScale``."""

from collections.abc import Mapping
from typing import Any

from .._precision import SMALLEST_SCALE
from .._rules.base import LossScale
from .._state import LossScaleState
from .._validation import check
from ._build import Growing, growing
from ._saved import Form, arrays, restored

_FORM = Form(
    system="Flax",
    source="`flax.serialization.to_state_dict(scale)`",
    fields={"fin_steps": "growth_tracker", "scale": "loss_scale"},
)


def flax_dynamic_scale(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> Growing:
    """Return the rule of ``flax.training.dynamic_scale.DynamicScale``.

    Flax grows the scale one step later than it documents, so the ``growth_interval`` of
    the rule is larger by 1.

    Args:
        growth_factor: the factor by which the scale grows, above 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the one that grows the scale.
        scale: the first scale, from 2**-126 to 2**126.
        minimum_scale: the smallest scale, 0 or more, or None.

    Returns:
        A `DynamicLossScale` or `VerbatimLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.flax_dynamic_scale().growth_interval
        2001
    """
    growth_interval = check("growth_interval", growth_interval) + 1
    minimum_scale = 0.0 if minimum_scale is None else minimum_scale
    return growing(**locals())


def from_flax_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, Growing]:
    """Return the state and the rule that continue a saved Flax ``DynamicScale``.

    Args:
        state_dict: what ``flax.serialization.to_state_dict`` returned for it.
        arguments: those of `flax_dynamic_scale`, which Flax does not save.

    Returns:
        The state, and the rule of `flax_dynamic_scale`.

    Raises:
        TypeError, ValueError: as `from_torch_state_dict`.

    Examples:
        >>> from optax_lossscale import presets
        >>> state_dict = {"fin_steps": 7, "scale": 1024.0}
        >>> state, rule = presets.from_flax_state_dict(state_dict, growth_interval=100)
        >>> presets.to_flax_state_dict(state, rule) == state_dict
        True
    """
    fields, _ = _FORM.read(state_dict)
    rule = flax_dynamic_scale(**arguments)
    return restored(rule, fields), rule


def to_flax_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return a state dict for ``flax.serialization.from_state_dict``.

    Give the ``DynamicScale`` a ``growth_interval`` that is smaller by 1 than that of
    the rule. Flax saves neither a maximum nor the counts of skipped steps.

    Args:
        state: whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        What `from_flax_state_dict` takes, as arrays of shape ``()``.

    Raises:
        ValueError: as `get_loss_scale_state`, or if Flax cannot follow the rule.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.flax_dynamic_scale()
        >>> float(presets.to_flax_state_dict(rule.init(), rule)["scale"])
        65536.0
    """
    return arrays(_FORM.write(state, rule, hysteresis=1))
