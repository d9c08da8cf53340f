"""Megatron-LM: ``DynamicGradScaler``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._precision import LARGEST_SCALE
from .._rules.arguments import check_init_scale, check_order
from .._rules.base import LossScale
from .._rules.dynamic import DynamicLossScale
from .._state import LossScaleState
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

    The scale is multiplied by ``growth_factor`` at every ``growth_interval``-th finite
    step in a row. The first ``hysteresis - 1`` non-finite steps leave the scale, every
    further one multiplies it by ``backoff_factor``, down to ``min_scale``, until a
    growth resets the hysteresis counter. These steps need not be consecutive:
    Megatron-LM does so, though it documents otherwise.

    Departures: the ceiling is 2**126, where Megatron-LM has none. Its constant scaler
    is ``FixedLossScale(scale)``. The defaults are those of its command line.

    Args:
        initial_scale: the first scale, from ``min_scale`` to 2**126.
        min_scale: the least scale, 0 or more; in effect 2**-126 or more.
        growth_factor: what a growth multiplies it by, more than 1.
        backoff_factor: what a backoff multiplies it by, between 0 and 1.
        growth_interval: finite steps in a row before a growth.
        hysteresis: non-finite steps that it takes to back off.

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
    init_scale = check_init_scale(initial_scale, "initial_scale")
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
    """Go on where Megatron-LM's ``DynamicGradScaler`` stopped.

    Args:
        state_dict: what its ``state_dict()`` returned: ``scale`` (one element), and
            ``growth_tracker`` and ``hysteresis_tracker``.
        arguments: those of `megatron`, which Megatron-LM does not save.

    Returns:
        The state, and the rule of `megatron`.

    Raises:
        TypeError: if ``state_dict`` is no dictionary, or an argument is unknown.
        ValueError: if it has other keys, or a value is no number or out of range.

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
        "what `DynamicGradScaler.state_dict()` gave",
    )
    rule = megatron(**arguments)
    scale = read_scale(state_dict, "scale")
    counts = {name: read_count(state_dict, name) for name in trackers}
    return restored(rule, loss_scale=scale, **counts), rule


def to_megatron_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return what Megatron-LM's ``DynamicGradScaler.load_state_dict`` takes.

    The scale has to be made a tensor first, with ``torch.from_numpy``. Megatron-LM has
    no ceiling: that of the rule stays behind, like the counts of skipped steps.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that made it.

    Returns:
        The keys of `from_megatron_state_dict`: the scale as a float32 array of shape
        ``(1,)``, the trackers as Python's own numbers.

    Raises:
        ValueError: if Megatron-LM could not follow the rule, or ``state`` has no loss
            scale or more than one.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.megatron()
        >>> presets.to_megatron_state_dict(rule.init(), rule)["hysteresis_tracker"]
        2
    """
    scale, growth_tracker, hysteresis_tracker = numbers(state)
    if getattr(rule, "hysteresis", None) == 1:
        check_follows(rule, "Megatron-LM")  # the kinds of refill do not differ then
    else:
        check_follows(rule, "Megatron-LM", hysteresis_refill="growth")
    return {
        "scale": np.array([scale], np.float32),
        "growth_tracker": growth_tracker,
        "hysteresis_tracker": hysteresis_tracker,
    }
