"""jmp and Flax."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import presets
from .._loss_scale import LossScale
from .._state import LossScaleState
from ._common import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_scale,
    restored,
)


def from_jmp_state_dict(d: Mapping[str, Any]) -> tuple[LossScaleState, LossScale]:
    """Go on where a ``jmp.DynamicLossScale`` stopped.

    Args:
        d: ``dataclasses.asdict(loss_scale)``: ``loss_scale``, ``counter``, ``period``,
            ``factor`` and ``min_loss_scale``.

    Returns:
        The state, and the rule of `presets.jmp_dynamic`, of which the ``init_scale`` is
        the scale saved.

    Raises:
        TypeError: if ``d`` is no dictionary.
        ValueError: if its keys are others, or a value is out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> d = {
        ...     "loss_scale": jnp.float32(1024.0),
        ...     "counter": jnp.int32(7),
        ...     "period": 2000,
        ...     "factor": 2,
        ...     "min_loss_scale": jnp.float32(1.0),
        ... }
        >>> state, rule = ls.from_jmp_state_dict(d)
        >>> ls.to_jmp_state_dict(state, rule) == d
        True

    References:
        `jmp <https://github.com/google-deepmind/jmp#loss-scaling>`_
    """
    keys = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
    check_keys(d, keys, "`dataclasses.asdict(loss_scale)`")
    scale = read_scale(d, "loss_scale")
    rule = presets.jmp_dynamic(**{k: d[k] for k in keys if k != "counter"})
    counter = read_count(d, "counter")
    return restored(rule, loss_scale=scale, growth_tracker=counter), rule


def to_jmp_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return the arguments of the ``jmp.DynamicLossScale`` that goes on from a state.

    jmp has no ceiling: that of the rule stays behind, like the counts of skipped steps.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that made it.

    Returns:
        The keys of `from_jmp_state_dict`, as in
        ``jmp.DynamicLossScale(**ls.to_jmp_state_dict(opt_state, rule))``: arrays of
        shape ``()`` for the scale, its floor and the counter.

    Raises:
        ValueError: if jmp could not follow the rule, or ``state`` has no loss scale or
            more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.DynamicLossScale(growth_interval=100)
        >>> ls.to_jmp_state_dict(rule.init(), rule)["period"]
        100
    """
    scale, growth_tracker, _ = numbers(state)
    factor = float(getattr(rule, "growth_factor", 1.0))
    rule = check_follows(rule, "jmp", hysteresis=1, backoff_factor=1 / factor)
    dtype = getattr(rule, "scale_dtype", "float32")
    return {
        "loss_scale": jnp.asarray(scale, dtype),
        "counter": jnp.asarray(growth_tracker, jnp.int32),
        "period": rule.growth_interval,
        "factor": int(factor) if factor.is_integer() else factor,
        "min_loss_scale": jnp.asarray(rule.min_scale, dtype),
    }


def from_flax_state_dict(
    d: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, LossScale]:
    """Go on where a ``flax.training.dynamic_scale.DynamicScale`` stopped.

    Args:
        d: what ``flax.serialization.to_state_dict`` made of it: ``scale`` and
            ``fin_steps``.
        arguments: those of `presets.flax_dynamic_scale`, which Flax does not save.

    Returns:
        The state, and the rule of `presets.flax_dynamic_scale`.

    Raises:
        TypeError: if ``d`` is no dictionary, or an argument is unknown.
        ValueError: if its keys are others, or a value is out of range.

    Examples:
        >>> import optax_lossscale as ls
        >>> d = {"fin_steps": 7, "scale": 1024.0}
        >>> state, rule = ls.from_flax_state_dict(d, growth_interval=100)
        >>> ls.to_flax_state_dict(state, rule) == d
        True

    References:
        `flax/training/dynamic_scale.py
        <https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py>`_
    """
    check_keys(d, ("fin_steps", "scale"), "`flax.serialization.to_state_dict(scale)`")
    rule = presets.flax_dynamic_scale(**arguments)
    scale, fin_steps = read_scale(d, "scale"), read_count(d, "fin_steps")
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
        >>> import optax_lossscale as ls
        >>> rule = ls.presets.flax_dynamic_scale()
        >>> float(ls.to_flax_state_dict(rule.init(), rule)["scale"])
        65536.0
    """
    scale, growth_tracker, _ = numbers(state)
    check_follows(rule, "Flax", hysteresis=1, scale_dtype="float32")
    return {
        "fin_steps": np.asarray(growth_tracker, np.int32),
        "scale": np.asarray(scale, np.float32),
    }
