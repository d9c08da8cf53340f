"""Flax: ``flax.training.dynamic_scale.DynamicScale``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._precision import SMALLEST_SCALE
from .._rules.arguments import check_init_scale
from .._rules.base import LossScale
from .._state import LossScaleState
from .._validation import check_count
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

    The scale is multiplied by ``growth_factor`` at every finite step that follows
    ``growth_interval`` others in a row, one later than Flax documents, and by
    ``backoff_factor``, down to ``minimum_scale``, at every non-finite step. The late
    growth is kept: the rule's own ``growth_interval`` is larger by 1.

    Departures: the ceiling is 2**126, where Flax's is the largest float32, which is no
    power of two. ``minimum_scale=None`` is 2**-126, where the scale of Flax falls to 0
    and makes NaN of every gradient.

    Args:
        growth_factor: what a growth multiplies the scale by, more than 1.
        backoff_factor: what an overflow multiplies it by, between 0 and 1.
        growth_interval: finite steps in a row before one that grows.
        scale: the first scale, from 2**-126 to 2**126. One below the least scale stays
            until an overflow raises it, as in Flax.
        minimum_scale: the least scale, 0 or more; in effect 2**-126 or more, or None.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale below the least.

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
        "It is how many finite steps in a row come before one that grows.",
    )
    least = SMALLEST_SCALE if minimum_scale is None else minimum_scale
    return growing(
        init_scale=check_init_scale(scale, "scale"),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=interval + 1,
        min_scale=floor(least, "minimum_scale"),
    )


def from_flax_state_dict(
    state_dict: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, Growing]:
    """Go on where a ``flax.training.dynamic_scale.DynamicScale`` stopped.

    Args:
        state_dict: what ``flax.serialization.to_state_dict`` made of it: ``scale`` and
            ``fin_steps``.
        arguments: those of `flax_dynamic_scale`, which Flax does not save.

    Returns:
        The state, and the rule of `flax_dynamic_scale`.

    Raises:
        TypeError: if ``state_dict`` is no dictionary, or an argument is unknown.
        ValueError: if it has other keys, or a value is no number or out of range.

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
    """Return what ``flax.serialization.from_state_dict`` takes for a ``DynamicScale``.

    Its ``growth_interval`` is that of the rule less 1, since Flax is one step late.
    Flax has no ceiling: that of the rule stays behind, like the counts of skipped
    steps.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that made it.

    Returns:
        The keys of `from_flax_state_dict`, with arrays of shape ``()``.

    Raises:
        ValueError: if Flax could not follow the rule, or ``state`` has no loss scale or
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
