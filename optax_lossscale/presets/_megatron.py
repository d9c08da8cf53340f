"""Megatron-LM: ``DynamicGradScaler``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._precision import LARGEST_SCALE
from .._rules.base import LossScale
from .._rules.dynamic import DynamicLossScale
from .._state import LossScaleState
from .._validation import check_order
from ._build import translated
from ._saved import Form, restored

_FORM = Form(
    system="Megatron-LM",
    source="what `DynamicGradScaler.state_dict()` returned",
    fields={
        "scale": "loss_scale",
        "growth_tracker": "growth_tracker",
        "hysteresis_tracker": "hysteresis_tracker",
    },
)


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Return the rule of Megatron-LM's ``DynamicGradScaler``.

    The first ``hysteresis - 1`` non-finite steps leave the scale unchanged. Each
    further one lowers it, until growth resets the hysteresis counter. They need not be
    consecutive: that is what Megatron-LM does, although it documents otherwise.

    Args:
        initial_scale: the first scale, from ``min_scale`` to 2**126.
        min_scale: the smallest scale, 0 or more.
        growth_factor: the factor by which the scale grows, above 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: how many non-finite steps it takes to back off.

    Returns:
        A `DynamicLossScale`. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.megatron().hysteresis_refill
        'growth'
    """
    ours = translated(**locals(), hysteresis_refill="growth", max_scale=LARGEST_SCALE)
    check_order(min_scale=ours["min_scale"], initial_scale=ours["init_scale"])
    return DynamicLossScale(**ours)


def from_megatron_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, DynamicLossScale]:
    """Return the state and the rule that continue a saved Megatron-LM scaler.

    Args:
        state_dict: what ``DynamicGradScaler.state_dict()`` returned.
        arguments: those of `megatron`, which Megatron-LM does not save.

    Returns:
        The state, and the rule of `megatron`.

    Raises:
        TypeError, ValueError: as `from_torch_state_dict`.

    Examples:
        >>> from optax_lossscale import presets
        >>> state_dict = {"scale": 8.0, "growth_tracker": 7, "hysteresis_tracker": 1}
        >>> state, rule = presets.from_megatron_state_dict(state_dict, min_scale=2.0)
        >>> presets.to_megatron_state_dict(state, rule) == state_dict
        True
    """
    fields, _ = _FORM.read(state_dict)
    rule = megatron(**arguments)
    return restored(rule, fields), rule


def to_megatron_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return a state dict for Megatron-LM's ``DynamicGradScaler.load_state_dict``.

    Convert its scale to a tensor with ``torch.from_numpy`` before you load it.
    Megatron-LM saves neither a maximum nor the counts of skipped steps.

    Args:
        state: whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        What `from_megatron_state_dict` takes. The scale is a float32 array of shape
        ``(1,)``; the trackers are Python numbers.

    Raises:
        ValueError: as `get_loss_scale_state`, or if Megatron-LM cannot follow the rule.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.megatron()
        >>> presets.to_megatron_state_dict(rule.init(), rule)["hysteresis_tracker"]
        2
    """
    # With a hysteresis of 1, every kind of refill does the same.
    same = getattr(rule, "hysteresis", 1) == 1
    saved = _FORM.write(state, rule, **{} if same else {"hysteresis_refill": "growth"})
    return {**saved, "scale": np.array([saved["scale"]], np.float32)}
