"""jmp: ``StaticLossScale`` and ``DynamicLossScale``."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import SCALE_DTYPES, check
from ._build import Growing, factors, floor, growing
from ._saved import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_number,
    read_scale,
    restored,
)


def jmp_static(loss_scale: float) -> FixedLossScale:
    """Return the rule of ``jmp.StaticLossScale``.

    The scale is constant. Non-finite steps are skipped, as jmp recommends; jmp itself
    leaves this to the caller. To apply every step, use
    ``FixedLossScale(scale, skip_nonfinite=False)``. For ``jmp.NoOpLossScale``, use
    ``FixedLossScale(1.0)``.

    Departures: gradients are divided in float32 or wider; jmp divides float16 gradients
    in float16 and flushes small ones to zero.

    Args:
        loss_scale: the scale, 1 or more.

    Returns:
        A `FixedLossScale`.

    Raises:
        ValueError: if the scale is below 1 or not a number.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.jmp_static(2.0**15)
        FixedLossScale(loss_scale=32768.0, skip_nonfinite=True)

    References:
        `jmp <https://github.com/google-deepmind/jmp#loss-scaling>`_
    """
    return FixedLossScale(loss_scale)


def jmp_dynamic(
    loss_scale: Any,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> Growing:
    """Return the rule of ``jmp.DynamicLossScale``.

    The scale is multiplied by ``factor`` after every ``period`` finite steps in a row.
    It is divided by ``factor``, down to ``min_loss_scale``, after every non-finite
    step. If ``loss_scale`` is a float16 or bfloat16 number, the scale is rounded to
    that type and does not grow out of its range.

    Departures: ``min_loss_scale`` is kept under ``jit``; jmp uses 1 instead. The
    maximum is 2**126; in jmp it is the largest float32, whose reciprocal is flushed to
    zero. Gradients are divided in float32 or wider.

    Args:
        loss_scale: the first scale, from 2**-126 to 2**126. If it is below
            ``min_loss_scale``, it stays until an overflow raises it, as in jmp.
        period: finite steps in a row before the scale grows.
        factor: the factor by which the scale grows and backs off, above 1.
        min_loss_scale: the smallest scale, 0 or more; values below 2**-126 mean
            2**-126.

    Returns:
        A `DynamicLossScale`, or a `VerbatimLossScale` if ``loss_scale`` is float16 or
        bfloat16, or below ``min_loss_scale``.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_lossscale import presets
        >>> presets.jmp_dynamic(jnp.asarray(2.0**15), period=100).growth_interval
        100
        >>> presets.jmp_dynamic(jnp.float16(2.0**15)).scale_dtype
        'float16'

    References:
        `jmp <https://github.com/google-deepmind/jmp#loss-scaling>`_
    """
    dtype = str(getattr(loss_scale, "dtype", "float32"))
    narrow = dtype if dtype in SCALE_DTYPES else "float32"
    return growing(
        init_scale=check("init_scale", loss_scale, "loss_scale"),
        **factors(factor, "factor"),
        growth_interval=check("growth_interval", period, "period"),
        min_scale=floor(min_loss_scale, "min_loss_scale"),
        scale_dtype=narrow,
    )


def from_jmp_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[LossScaleState, Growing]:
    """Return the state and the rule that continue a saved ``jmp.DynamicLossScale``.

    Args:
        state_dict: ``dataclasses.asdict(loss_scale)``: ``loss_scale``, ``counter``,
            ``period``, ``factor`` and ``min_loss_scale``.

    Returns:
        The state, and the rule of `jmp_dynamic`, whose ``init_scale`` is the saved
        scale.

    Raises:
        TypeError: if ``state_dict`` is not a dictionary.
        ValueError: if ``state_dict`` has other keys, or a value is not a number or out
            of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_lossscale import presets
        >>> state_dict = {
        ...     "loss_scale": jnp.float32(1024.0),
        ...     "counter": jnp.int32(7),
        ...     "period": 2000,
        ...     "factor": 2,
        ...     "min_loss_scale": jnp.float32(1.0),
        ... }
        >>> state, rule = presets.from_jmp_state_dict(state_dict)
        >>> presets.to_jmp_state_dict(state, rule) == state_dict
        True

    References:
        `jmp <https://github.com/google-deepmind/jmp#loss-scaling>`_
    """
    keys = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
    check_keys(state_dict, keys, "`dataclasses.asdict(loss_scale)`")
    scale = read_scale(state_dict, "loss_scale")
    arguments = {key: read_number(state_dict, key) for key in keys[2:]}
    dtype = str(getattr(state_dict["loss_scale"], "dtype", "float32"))
    first = jnp.asarray(scale, dtype) if dtype in SCALE_DTYPES else scale
    rule = jmp_dynamic(first, **arguments)
    counter = read_count(state_dict, "counter")
    return restored(rule, loss_scale=scale, growth_tracker=counter), rule


def to_jmp_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return the arguments of a ``jmp.DynamicLossScale`` that continues a run.

    jmp has no maximum and does not count skipped steps, so the rule's maximum and these
    counts are lost.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        The keys of `from_jmp_state_dict`, which are the arguments of
        ``jmp.DynamicLossScale``. The scale, its minimum and the counter are arrays of
        shape ``()``.

    Raises:
        ValueError: if jmp cannot follow the rule, or ``state`` has no loss scale or
            more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> from optax_lossscale import presets
        >>> rule = ls.DynamicLossScale(growth_interval=100)
        >>> presets.to_jmp_state_dict(rule.init(), rule)["period"]
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
