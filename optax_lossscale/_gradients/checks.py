"""What a block whose backward pass is scaled must not do, and had better not."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._finite import AxisName, check_axis_name
from .._jax_internals import COLLECTIVE, DEBUGGING, effect_names
from .._tree import is_inexact
from .._validation import describe


def check_effects(jaxpr: Jaxpr) -> None:
    effects = effect_names(jaxpr) - {COLLECTIVE, *DEBUGGING}
    if effects:
        raise TypeError(
            "`fun` must be a function without effects other than those of "
            f"`jax.debug`, got one with {sorted(effects)}. Take callbacks and mutable "
            "arrays out of the block."
        )


def warn_of_underflow(
    inputs: Sequence[Any], outputs: Sequence[Any], where: tuple[str, int]
) -> None:
    """Warn of types in which cotangents arrive and leave, if these may be too narrow.

    They underflow there, before they are scaled or after they are unscaled.
    """
    for side, arrays in (("is given", inputs), ("returns", outputs)):
        narrow = [x for x in arrays if is_inexact(x) and _underflows(x.dtype)]
        if narrow:
            warnings.warn_explicit(
                "Gradients may underflow at the border of a block that "
                f"`scale_backward` wraps, since it {side} {describe(narrow[0])}: "
                "they are scaled only inside the block. Give it float32, cast inside "
                "of it, and let it return float32.",
                UserWarning,
                *where,
            )


def _underflows(dtype: Any) -> bool:
    return jnp.finfo(dtype).tiny > jnp.finfo(jnp.float32).tiny


def check_axes(jaxpr: Jaxpr, axis_name: AxisName | None) -> None:
    """Refuse to mix the gradients of devices that have scales of their own."""
    if axis_name is not None:
        check_axis_name(axis_name)
    effects: Any = jaxpr.effects
    used = {e.name for e in effects if type(e).__name__ == COLLECTIVE}
    axes = used - set(axis_name if isinstance(axis_name, tuple) else [axis_name])
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis that `fun` or its gradient uses, "
            f"here {sorted(axes, key=str)}, got {axis_name!r}. Else gradients at "
            "different scales would be added up, or some devices would wait for others "
            "forever. Add the axis; parameters that all devices share are such a case."
        )
