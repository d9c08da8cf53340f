"""Flax: ``flax.training.dynamic_scale.DynamicScale``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._precision import SMALLEST_SCALE
from .._rules.base import LossScale
from .._state import LossScaleState
from .._validation import check, check_count
from ._build import Growing, floor, growing
from ._saved import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_scale,
    restored,
)


def flax_dynamic_scale(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> Growing:
    """Return the rule of ``flax.training.dynamic_scale.DynamicScale``.

    The scale is multiplied by ``growth_factor`` after every ``growth_interval + 1``
    finite steps in a row, and by ``backoff_factor``, down to ``minimum_scale``, after
    every non-finite step. Flax documents ``growth_interval`` steps but takes one more,
    so the ``growth_interval`` of the returned rule is larger by 1.

    Departures: the maximum is 2**126; in Flax it is the largest float32, which is not a
    power of two. ``minimum_scale=None`` means 2**-126; in Flax the scale falls to 0 and
    turns every gradient into NaN.

    Args:
        growth_factor: the factor by which the scale grows, more than 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the one that grows the scale.
        scale: the first scale, from 2**-126 to 2**126. If it is below
            ``minimum_scale``, it stays until an overflow raises it, as in Flax.
        minimum_scale: the smallest scale, 0 or more, or None; values below 2**-126 mean
            2**-126.

    Returns:
        A `DynamicLossScale`, or a `VerbatimLossScale` if ``scale`` is below
        ``minimum_scale``.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.flax_dynamic_scale().growth_interval
        2001

    References:
        `flax/training/dynamic_scale.py
        <https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py>`_
    """
    interval = check_count(
        "growth_interval",
        growth_interval,
        "It is how many finite steps in a row precede the one that grows the scale.",
    )
    least = SMALLEST_SCALE if minimum_scale is None else minimum_scale
    return growing(
        init_scale=check("init_scale", scale, "scale"),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=interval + 1,
        min_scale=floor(least, "minimum_scale"),
    )


def from_flax_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, Growing]:
    """Return the state and the rule that continue a saved Flax ``DynamicScale``.

    Args:
        state_dict: what ``flax.serialization.to_state_dict`` returned for the
            ``flax.training.dynamic_scale.DynamicScale``: ``scale`` and ``fin_steps``.
        arguments: the arguments of `flax_dynamic_scale`, which Flax does not save.

    Returns:
        The state, and the rule of `flax_dynamic_scale`.

    Raises:
        TypeError: if ``state_dict`` is not a dictionary, or an argument is unknown.
        ValueError: if ``state_dict`` has other keys, or a value is not a number or out
            of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> state_dict = {"fin_steps": 7, "scale": 1024.0}
        >>> state, rule = presets.from_flax_state_dict(state_dict, growth_interval=100)
        >>> presets.to_flax_state_dict(state, rule) == state_dict
        True

    References:
        `flax/training/dynamic_scale.py
        <https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py>`_
    """
    check_keys(
        state_dict,
        ("fin_steps", "scale"),
        "`flax.serialization.to_state_dict(scale)`",
    )
    rule = flax_dynamic_scale(**arguments)
    scale = read_scale(state_dict, "scale")
    fin_steps = read_count(state_dict, "fin_steps")
    return restored(rule, loss_scale=scale, growth_tracker=fin_steps), rule


def to_flax_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return a state dict to restore into a Flax ``DynamicScale``.

    Pass it to ``flax.serialization.from_state_dict``. Give the ``DynamicScale`` a
    ``growth_interval`` that is smaller by 1 than that of the rule, because Flax grows
    one step late. Flax has no maximum and does not count skipped steps, so the rule's
    maximum and these counts are lost.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        The keys of `from_flax_state_dict`, with arrays of shape ``()``.

    Raises:
        ValueError: if Flax cannot follow the rule, or ``state`` has no loss scale or
            more than one.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.flax_dynamic_scale()
        >>> float(presets.to_flax_state_dict(rule.init(), rule)["scale"])
        65536.0
    """
    scale, growth_tracker, _ = numbers(state)
    check_follows(rule, "Flax", hysteresis=1, scale_dtype="float32")
    return {
        "fin_steps": np.asarray(growth_tracker, np.int32),
        "scale": np.asarray(scale, np.float32),
    }
