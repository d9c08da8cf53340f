"""Combine values over the devices along mapped axes."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from ._jax_internals import varying_axes

AxisName = Hashable | tuple[Hashable, ...]


def all_along(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Return whether a flag is True on all devices along the mapped axes."""
    if axis_name is None:
        return flag
    return reduce_along(jax.lax.pmin, flag.astype(jnp.int32), axis_name) == 1


def check_agreement(
    decision: jax.Array, scale: jax.Array, axis_name: AxisName | None
) -> None:
    """Raise if devices of a ``shard_map`` that share a scale could decide differently.

    With ``check_vma=False``, jax does not report it, so this raises no error.
    """
    axes = varying_axes(decision) - varying_axes(scale)
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis along which the loss or gradients "
            "differ (with `check_updates`, parameters and state as well), here "
            f"{sorted(axes, key=str)}, got {axis_name!r}. Otherwise some devices would "
            "skip or retry a step that others apply. Their parameters would then "
            "differ, or they would wait for each other forever. Add the axis, or "
            "average the loss and its gradients. If each device trains its own model, "
            "each needs its own state: `jax.vmap(tx.init)` makes one for each, to be "
            "sharded along the axis."
        )


def reduce_along(
    reduce: Callable[[Any, AxisName], Any], x: Any, axis_name: AxisName | None
) -> Any:
    """Reduce a tree of arrays over the devices along the mapped axes."""
    if axis_name is None:
        return x
    check_axis_name(axis_name)
    return reduce(x, axis_name)


def check_axis_name(axis_name: AxisName | None) -> None:
    """Raise if a name, or one in a tuple of names, is not bound here."""
    if axis_name is None:
        return
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        hash(axis_name)  # some functions of JAX take a list, but not all of ours
        # ``jax.lax`` takes an integer for an axis of the array. The psum of a Python
        # number raises the same error in all kinds of mapped functions.
        if all(not isinstance(name, int) for name in names):
            jax.lax.psum(1, axis_name)
            return
        unbound = None
    except (NameError, TypeError) as error:
        unbound = error
    raise ValueError(
        "`axis_name` must name an axis of the surrounding `shard_map`, `pmap` or "
        f"`vmap(axis_name=...)`, or a tuple of them, got {axis_name!r}. "
        "Under plain `jit`, leave it out: arrays are global, so the check covers all "
        "devices."
    ) from unbound
