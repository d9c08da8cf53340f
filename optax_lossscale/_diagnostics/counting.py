"""Count the elements of arrays by what a narrow type makes of them, on the device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from .._precision import Limits
from .._tree import dtype_of, wide_dtype

LARGEST_COUNT = np.iinfo(np.int32).max


@functools.partial(jax.jit, static_argnames="limits")
def measure(
    leaves: list[jax.Array | None], scale: jax.Array, limits: Limits
) -> tuple[jax.Array, jax.Array]:
    """Return int32 counts of shape (7, leaves), as the fields go, and ``max_abs``."""
    counts, max_abs = zip(*(_leaf(x, scale, limits) for x in leaves), strict=True)
    return jnp.stack(counts, axis=1), jnp.stack(max_abs)


@functools.partial(jax.jit, static_argnames="limits")
def _leaf(
    x: jax.Array | None, scale: jax.Array, limits: Limits
) -> tuple[jax.Array, jax.Array]:
    """Measure one array; compiled, so that arrays of one shape are traced once."""
    if x is None:
        return jnp.zeros(7, jnp.int32), jnp.zeros((), jnp.float32)
    x = jnp.asarray(x, wide_dtype(dtype_of(x)))
    magnitude = jnp.abs(x)
    if jnp.iscomplexobj(x):  # newer jax takes inf for inf and NaN
        magnitude = jnp.where(jnp.isnan(x), jnp.nan, magnitude)
    scaled = magnitude * scale.astype(magnitude.dtype)
    # A limit outside of the normal numbers would be taken for zero, or overflow.
    wide = jnp.finfo(magnitude.dtype)
    normal_limit = max(limits.normal, float(wide.tiny))
    overflow_limit = limits.overflow if limits.overflow <= float(wide.max) else math.inf
    # Counted upwards from zero, the fewest comparisons: NaN fails all but the first.
    flags = (
        magnitude != magnitude,
        magnitude == math.inf,
        magnitude == 0,
        scaled <= limits.zero,
        scaled < normal_limit,
        scaled >= overflow_limit,
    )
    finite = jnp.where(magnitude < math.inf, magnitude, 0)
    finite = jnp.minimum(finite, float(jnp.finfo(jnp.float32).max)).astype(jnp.float32)
    sums, max_abs = _sums_and_max(flags, finite)
    nan, inf, zero, to_zero, to_subnormal, to_overflow = sums
    counts = (
        *(nan, inf, zero),
        *(to_zero - zero, to_subnormal - to_zero, to_overflow - inf),
    )
    size = jnp.asarray(min(x.size, LARGEST_COUNT), jnp.int32)
    return jnp.stack([*map(total, counts), size]), jnp.max(max_abs)


def _sums_and_max(
    flags: tuple[jax.Array, ...], x: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """Count flags and take the maximum of one more array, all in one pass.

    XLA CPU makes one vectorized loop of a reduction with many operands, and a slow one
    of each of many reductions. Where counts may not fit, only one axis is reduced.
    """
    fits = x.size <= LARGEST_COUNT
    axes = tuple(range(x.ndim)) if fits else (int(np.argmax(x.shape)),)

    def combine(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
        sums = [a + b for a, b in zip(left[:-1], right[:-1], strict=True)]
        return [*sums, jnp.maximum(left[-1], right[-1])]

    operands = [*(flag.astype(jnp.int32) for flag in flags), x]
    starts = [np.zeros((), operand.dtype) for operand in operands]
    *sums, maximum = jax.lax.reduce(operands, starts, combine, axes)
    return sums, maximum


def total(counts: jax.Array, axis: int | None = None) -> jax.Array:
    """Sum counts; where the sum wraps around in int32, return the largest instead."""
    approximate = jnp.sum(counts, axis, dtype=jnp.float32)
    return saturated(jnp.sum(counts, axis, dtype=jnp.int32), approximate)


def saturated(number: jax.Array, approximate: jax.Array) -> jax.Array:
    # From 2**31 to 2**32 it has become negative; beyond, the rough sum tells.
    wrapped = (number < 0) | (approximate > 3e9)
    return jnp.where(wrapped, LARGEST_COUNT, number)
