"""Checks of functions that are traced: effects, mapped axes, narrow types."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._jax_internals import COLLECTIVE, DEBUGGING, effect_names
from .._tree import is_inexact
from .._validation import AxisName, check_axis_name, describe


def check_effects(jaxpr: Jaxpr) -> None:
    effects = effect_names(jaxpr) - {COLLECTIVE, *DEBUGGING}
    if effects:
        raise TypeError(
            "`fun` must be free of effects other than those of `jax.debug`, got one "
            f"with {sorted(effects)}. Move callbacks and mutable arrays out of the "
            "block."
        )


def warn_of_underflow(
    inputs: Sequence[Any], outputs: Sequence[Any], where: tuple[str, int]
) -> None:
    """Warn if cotangents arrive or leave in types in which they may underflow.

    They are scaled only inside the block.
    """
    for side, arrays in (("takes", inputs), ("returns", outputs)):
        narrow = [x for x in arrays if is_inexact(x) and _underflows(x.dtype)]
        if narrow:
            warnings.warn_explicit(
                "Gradients may underflow at the border of a block wrapped by "
                f"`scale_backward`, because it {side} {describe(narrow[0])}. "
                "They are scaled only inside the block. Pass float32, cast inside the "
                "block, and return float32.",
                UserWarning,
                *where,
            )


def _underflows(dtype: Any) -> bool:
    return jnp.finfo(dtype).tiny > jnp.finfo(jnp.float32).tiny


def check_axes(jaxpr: Jaxpr, axis_name: AxisName | None) -> None:
    """Raise if devices with different scales would communicate."""
    if axis_name is not None:
        check_axis_name(axis_name)
    effects: Any = jaxpr.effects
    used = {e.name for e in effects if type(e).__name__ == COLLECTIVE}
    axes = used - set(axis_name if isinstance(axis_name, tuple) else [axis_name])
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis that `fun` or its gradient uses, "
            f"here {sorted(axes, key=str)}, got {axis_name!r}. Otherwise "
            "gradients at different scales are summed, or some devices wait for others "
            "forever. Add the axis. It is also needed if all devices share parameters."
        )
