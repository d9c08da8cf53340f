"""Megatron-LM: ``DynamicGradScaler``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._precision import LARGEST_SCALE
from .._rules.base import LossScale
from .._rules.dynamic import DynamicLossScale
from .._state import LossScaleState
from .._validation import check, check_order
from ._build import floor
from ._saved import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_scale,
    restored,
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

    The scale is multiplied by ``growth_factor`` after every ``growth_interval`` finite
    steps in a row. The first ``hysteresis - 1`` non-finite steps leave it unchanged.
    Each further one multiplies it by ``backoff_factor``, down to ``min_scale``, until
    growth resets the hysteresis counter. These non-finite steps need not be
    consecutive: that is what Megatron-LM does, although it documents otherwise.

    The defaults are those of Megatron-LM's command line. For its constant scaler, use
    ``FixedLossScale(scale)``.

    Departures: the maximum is 2**126; Megatron-LM has none.

    Args:
        initial_scale: the first scale, from ``min_scale`` to 2**126.
        min_scale: the smallest scale, 0 or more; values below 2**-126 mean 2**-126.
        growth_factor: the factor by which the scale grows, more than 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: how many non-finite steps it takes to back off.

    Returns:
        A `DynamicLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.megatron()
        >>> rule.hysteresis, rule.hysteresis_refill
        (2, 'growth')

    References:
        `megatron/core/optimizer/grad_scaler.py
        <https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py>`_
    """
    init_scale = check("init_scale", initial_scale, "initial_scale")
    lowest = floor(min_scale, "min_scale")
    check_order(min_scale=lowest, initial_scale=init_scale)
    return DynamicLossScale(
        init_scale=init_scale,
        min_scale=lowest,
        max_scale=LARGEST_SCALE,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        hysteresis_refill="growth",
    )


def from_megatron_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, DynamicLossScale]:
    """Return the state and the rule that continue a saved Megatron-LM scaler.

    Args:
        state_dict: what ``DynamicGradScaler.state_dict()`` returned: ``scale`` (one
            element), ``growth_tracker`` and ``hysteresis_tracker``.
        arguments: the arguments of `megatron`, which Megatron-LM does not save.

    Returns:
        The state, and the rule of `megatron`.

    Raises:
        TypeError: if ``state_dict`` is not a dictionary, or an argument is unknown.
        ValueError: if ``state_dict`` has other keys, or a value is not a number or out
            of range.

    Examples:
        >>> import numpy as np
        >>> from optax_lossscale import presets
        >>> scale = np.array([65536.0], np.float32)
        >>> state_dict = {
        ...     "scale": scale,
        ...     "growth_tracker": 7,
        ...     "hysteresis_tracker": 1,
        ... }
        >>> state, rule = presets.from_megatron_state_dict(
        ...     state_dict, growth_interval=500
        ... )
        >>> presets.to_megatron_state_dict(state, rule) == state_dict
        True

    References:
        `megatron/core/optimizer/grad_scaler.py
        <https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py>`_
    """
    trackers = ("growth_tracker", "hysteresis_tracker")
    check_keys(
        state_dict,
        ("scale", *trackers),
        "what `DynamicGradScaler.state_dict()` returned",
    )
    rule = megatron(**arguments)
    scale = read_scale(state_dict, "scale")
    counts = {name: read_count(state_dict, name) for name in trackers}
    return restored(rule, loss_scale=scale, **counts), rule


def to_megatron_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return a state dict for Megatron-LM's ``DynamicGradScaler.load_state_dict``.

    Convert its scale to a tensor with ``torch.from_numpy`` before you load it.
    Megatron-LM has no maximum and does not count skipped steps, so the rule's maximum
    and these counts are lost.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        The keys of `from_megatron_state_dict`. The scale is a float32 array of shape
        ``(1,)``; the trackers are Python numbers.

    Raises:
        ValueError: if Megatron-LM cannot follow the rule, or ``state`` has no loss
            scale or more than one.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.megatron()
        >>> presets.to_megatron_state_dict(rule.init(), rule)["hysteresis_tracker"]
        2
    """
    scale, growth_tracker, hysteresis_tracker = numbers(state)
    if getattr(rule, "hysteresis", None) == 1:
        check_follows(rule, "Megatron-LM")  # every kind of refill does the same then
    else:
        check_follows(rule, "Megatron-LM", hysteresis_refill="growth")
    return {
        "scale": np.array([scale], np.float32),
        "growth_tracker": growth_tracker,
        "hysteresis_tracker": hysteresis_tracker,
    }
