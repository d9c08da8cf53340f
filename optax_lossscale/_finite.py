"""Check that a tree is finite and measure how large it is, on one device or many."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax_internals import varying_axes
from ._tree import dtype_of, is_inexact, wide_dtype
from ._validation import AxisName, check_axis_name


def all_finite(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Return whether all floating-point elements of a tree are finite.

    Use it to check values other than gradients, such as a batch or BatchNorm
    statistics, or if you call the ``update`` of a rule yourself. `with_loss_scaling`
    checks the gradients itself.

    Both parts of a complex element must be finite. Integers, booleans, PRNG keys and
    ``float0`` are always finite, and so is a tree without leaves. float8_e4m3fn and
    float4 have no infinity, so an overflow that saturates there cannot be detected.

    Flags such as ``--xla_cpu_enable_fast_math`` let the compiler assume that there are
    no NaNs. If they are in ``XLA_FLAGS``, `all_finite` detects them and compares bits
    instead. Do not pass such flags to a single program with the ``compiler_options`` of
    ``jax.jit``: they cannot be detected there, and they hide NaNs.

    Args:
        tree: any pytree of arrays.
        axis_name: the mapped axis, or a tuple of them, along which the results of all
            devices (``shard_map``, ``pmap``) or members (``vmap``) are combined.

    Returns:
        A boolean array of shape ``()``. With ``axis_name``, it is the same everywhere.

    Raises:
        ValueError: if ``axis_name`` is not bound here.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.all_finite({"w": jnp.ones(3), "b": jnp.array(jnp.nan)})
        Array(False, dtype=bool)
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    if leaves:
        finite = _all_finite(leaves, by_sums=_sums_show_nan())
    else:
        finite = jnp.ones((), jnp.bool_)
    return everywhere(finite, axis_name)


def everywhere(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Return whether a flag is True on all devices along the mapped axes."""
    if axis_name is None:
        return flag
    return across(jax.lax.pmin, flag.astype(jnp.int32), axis_name) == 1


def check_agreement(
    decision: jax.Array, scale: jax.Array, axis_name: AxisName | None
) -> None:
    """Raise if devices of a ``shard_map`` that share a scale could decide differently.

    With its ``check_vma=False`` jax does not know.
    """
    axes = varying_axes(decision) - varying_axes(scale)
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis along which the loss or gradients "
            "differ (with `check_updates`, parameters and state as well), here "
            f"{sorted(axes, key=str)}, got {axis_name!r}. Otherwise some devices would "
            "skip or retry a step that others do not, and drift apart or wait for each "
            "other forever. Add the axis, or average the loss and its gradients. If "
            "each device trains its own model, let its `scale_state` differ, too, with "
            "`jax.lax.pcast(scale_state, axis, to='varying')`."
        )


def across(
    reduce: Callable[[jax.Array, AxisName], jax.Array],
    x: jax.Array,
    axis_name: AxisName | None,
) -> jax.Array:
    """Reduce a value over the devices along the mapped axes."""
    if axis_name is None:
        return x
    check_axis_name(axis_name)
    return reduce(x, axis_name)


@functools.partial(jax.jit, static_argnames="by_sums")
def _all_finite(leaves: list[jax.Array], by_sums: bool) -> jax.Array:
    return _are_zero([_nonfinite_score(x, by_sums) for x in leaves])


def none_is_true(flags: list[jax.Array]) -> jax.Array:
    """Return whether all elements of some boolean arrays are False."""
    return _are_zero([_any(x) for x in flags]) if flags else jnp.ones((), jnp.bool_)


def _are_zero(scores: list[jax.Array]) -> jax.Array:
    stacked = jnp.stack(scores)
    # XLA fuses cheap operations into each consumer, so the mask of every leaf would
    # combine the flags of all leaves again. It does not do so with a dot.
    return jnp.vdot(stacked, stacked) == 0


def _any(flags: jax.Array) -> jax.Array:
    # On CPUs, the maximum of small integers is the fastest reduction of flags.
    return jnp.max(flags.astype(jnp.uint8), initial=0).astype(jnp.float32)


def _nonfinite_score(x: jax.Array, by_sums: bool) -> jax.Array:
    """Return 0 if every element is finite, else 1 or NaN, as float32."""
    if jnp.iscomplexobj(x):
        real, imag = (_nonfinite_score(part, by_sums) for part in (x.real, x.imag))
        return real + imag
    if by_sums and jnp.finfo(x.dtype).bits >= 32:
        # x - x is 0 or NaN, so the sum cannot overflow. XLA on CPU is slow at flags,
        # but computes sums at memory speed.
        return jnp.sum(x - x).astype(jnp.float32)
    # For narrower types, XLA on CPU would first write the float32 addends to memory.
    return _any(is_nonfinite(x))


def is_nonfinite(x: jax.Array) -> jax.Array:
    """Return which elements are NaN or infinite, by their bits.

    The compiler cannot remove this, even if it may assume that there are no NaNs.
    """
    if jnp.finfo(x.dtype).bits < 16:
        x = x.astype(jnp.float32)  # small types encode NaN and infinity in many ways
    integer = np.dtype(f"int{jnp.finfo(x.dtype).bits}")
    exponent = np.asarray(np.inf, x.dtype).view(integer)
    return jax.lax.bitcast_convert_type(x, integer) & exponent == exponent


@functools.cache
def _sums_show_nan() -> bool:
    """Return whether XLA computes x - x as IEEE 754 defines it.

    With ``--xla_cpu_enable_fast_math`` in ``XLA_FLAGS`` it assumes that x - x is 0. The
    flags hold for the whole process, so one small program is enough to find out.
    """
    with (
        jax.ensure_compile_time_eval(),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),  # the user may have forbidden it
    ):
        leaves = [np.asarray([1, x], np.float32) for x in (0, np.nan, np.inf)]
        flags = [_all_finite([jax.device_put(x)], True) for x in leaves]
        return bool(np.array_equal(jax.device_get(flags), [True, False, False]))


def max_magnitude(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Return the largest absolute value of the floating-point elements of a tree.

    Use it to pass ``max_magnitude`` to the ``update`` of a rule that takes it, such as
    `HeadroomLossScale`. `with_loss_scaling` does so itself.

    The result does not tell you about NaNs, which XLA on CPU drops from a maximum.
    Check `all_finite` as well.

    Args:
        tree: any pytree of arrays. Leaves that `all_finite` ignores are ignored.
        axis_name: the mapped axis, or a tuple of them, along which the maximum over all
            devices (``shard_map``, ``pmap``) or members (``vmap``) is taken.

    Returns:
        A float32 array of shape ``()``. It is 0 for a tree without elements. A finite
        value beyond the largest float32 is returned as the largest float32.

    Raises:
        ValueError: if ``axis_name`` is not bound here.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.max_magnitude({"w": jnp.array([0.5, -3.0]), "b": jnp.zeros(2)})
        Array(3., dtype=float32)
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    magnitudes = [_max_magnitude(x) for x in leaves]
    largest = jnp.max(jnp.stack(magnitudes)) if leaves else jnp.zeros((), jnp.float32)
    return across(jax.lax.pmax, largest, axis_name)


def _max_magnitude(x: Any) -> jax.Array:
    x = jnp.asarray(x, wide_dtype(dtype_of(x)))
    magnitude = jnp.abs(x)
    if jnp.iscomplexobj(x):
        # Both parts may be finite and the absolute value above the largest float.
        largest = jnp.finfo(magnitude.dtype).max
        finite = jnp.isfinite(x)
        magnitude = jnp.where(finite, jnp.minimum(magnitude, largest), magnitude)
    magnitude = jnp.max(magnitude, initial=0)
    float32_max = jnp.asarray(jnp.finfo(jnp.float32).max, magnitude.dtype)
    clipped = jnp.minimum(magnitude, float32_max)
    magnitude = jnp.where(jnp.isfinite(magnitude), clipped, magnitude)
    return magnitude.astype(jnp.float32)
