"""jmp: ``StaticLossScale`` and ``DynamicLossScale``."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import SCALE_DTYPES
from ._build import Growing, growing
from ._saved import Form, restored

_FORM = Form(
    system="jmp",
    source="`dataclasses.asdict(loss_scale)`",
    fields={
        "loss_scale": "loss_scale",
        "counter": "growth_tracker",
        "period": "growth_interval",
        "factor": "growth_factor",
        "min_loss_scale": "min_scale",
    },
)


def jmp_static(loss_scale: float) -> FixedLossScale:
    """Return the rule of ``jmp.StaticLossScale``.

    For ``jmp.NoOpLossScale``, use ``FixedLossScale(1.0)``.

    Args:
        loss_scale: the scale, 1 or more.

    Returns:
        A `FixedLossScale`, which skips non-finite steps. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.jmp_static(2.0**15)
        FixedLossScale(loss_scale=32768.0, skip_nonfinite=True)
    """
    return FixedLossScale(loss_scale)


def jmp_dynamic(
    loss_scale: Any,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> Growing:
    """Return the rule of ``jmp.DynamicLossScale``.

    If ``loss_scale`` is a float16 or bfloat16 number, the scale is rounded to that type
    and does not grow out of its range.

    Args:
        loss_scale: the first scale, from 2**-126 to 2**126.
        period: finite steps in a row before the scale grows.
        factor: the factor by which the scale grows and backs off, above 1.
        min_loss_scale: the smallest scale, 0 or more.

    Returns:
        A `DynamicLossScale` or `VerbatimLossScale`. See `departures`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_lossscale import presets
        >>> presets.jmp_dynamic(jnp.float16(2.0**15)).scale_dtype
        'float16'
    """
    return growing(**locals(), scale_dtype=_scale_dtype(loss_scale))


def from_jmp_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[LossScaleState, Growing]:
    """Return the state and the rule that continue a saved ``jmp.DynamicLossScale``.

    Args:
        state_dict: ``dataclasses.asdict(loss_scale)``.

    Returns:
        The state, and the rule of `jmp_dynamic` that starts at the saved scale.

    Raises:
        TypeError, ValueError: as `from_torch_state_dict`.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.jmp_dynamic(2.0**15)
        >>> state_dict = presets.to_jmp_state_dict(rule.init(), rule)
        >>> state, same = presets.from_jmp_state_dict(state_dict)
        >>> same == rule
        True
    """
    fields, arguments = _FORM.read(state_dict)
    dtype = _scale_dtype(state_dict["loss_scale"])
    rule = jmp_dynamic(jnp.asarray(fields["loss_scale"], dtype), **arguments)
    return restored(rule, fields), rule


def to_jmp_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return the arguments of a ``jmp.DynamicLossScale`` that continues a run.

    jmp saves neither a maximum nor the counts of skipped steps.

    Args:
        state: whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        What `from_jmp_state_dict` takes. The scale, its minimum and the counter are
        arrays of shape ``()``.

    Raises:
        ValueError: as `get_loss_scale_state`, or if jmp cannot follow the rule.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.jmp_dynamic(2.0**15, period=100)
        >>> presets.to_jmp_state_dict(rule.init(), rule)["period"]
        100
    """
    dtype = getattr(rule, "scale_dtype", "float32")
    factor = getattr(rule, "growth_factor", 2.0)
    saved = _FORM.write(
        state, rule, hysteresis=1, backoff_factor=1 / factor, scale_dtype=dtype
    )
    return {
        **saved,
        "loss_scale": jnp.asarray(saved["loss_scale"], dtype),
        "counter": jnp.asarray(saved["counter"], jnp.int32),
        "factor": int(factor) if factor.is_integer() else factor,
        "min_loss_scale": jnp.asarray(saved["min_loss_scale"], dtype),
    }


def _scale_dtype(loss_scale: Any) -> str:
    """Return the type to which jmp rounds the scale: that of the first one."""
    dtype = str(getattr(loss_scale, "dtype", "float32"))
    return dtype if dtype in SCALE_DTYPES else "float32"
