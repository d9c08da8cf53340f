"""Count on the device how many elements a narrow type would lose."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._precision import Limits
from .._tree import dtype_of, wide_dtype

LARGEST_COUNT = np.iinfo(np.int32).max

# Counts that may not fit int32 have two digits, high * 2**14 + low, each an int32.
# The counts of 2**17 arrays or devices can be added digit by digit.
_BITS = 14

_INF = int(np.float32(np.inf).view(np.int32))

_Operands = list[jax.Array]


@functools.partial(jax.jit, static_argnames="limits")
def measure(
    leaves: list[jax.Array | None], scale: jax.Array, limits: Limits
) -> tuple[jax.Array, jax.Array]:
    """Return counts in two digits, of shape (2, 7, leaves), and ``max_abs``.

    The seven counts are nan, inf, zero, underflow, subnormal, overflow and size.
    Nothing here is differentiated.
    """
    leaves, scale = jax.lax.stop_gradient((leaves, scale))
    sums, max_abs = zip(*(_leaf(x, scale, limits) for x in leaves), strict=True)
    nan, nonfinite, zero, to_zero, to_subnormal, to_overflow, size = jnp.stack(sums, 2)
    counts = (
        *(nan, nonfinite - nan, zero - nonfinite),
        *(to_zero - zero, to_subnormal - to_zero, to_overflow, size),
    )
    return jnp.stack(_carried(*jnp.stack(counts, axis=1))), jnp.stack(max_abs)


@jax.jit
def as_int32(counts: jax.Array) -> jax.Array:
    """Join the two digits on the first axis; counts that do not fit saturate."""
    low, high = _carried(*counts)
    return jnp.where(high < 2 ** (31 - _BITS), (high << _BITS) | low, LARGEST_COUNT)


@jax.jit
def as_float32(counts: jax.Array) -> jax.Array:
    """Join the two digits on the first axis, and round."""
    low, high = counts.astype(jnp.float32)
    return high * 2.0**_BITS + low


@jax.jit
def total(counts: jax.Array) -> jax.Array:
    """Sum int32 counts over the first axis; sums that do not fit saturate."""
    digits = jnp.stack(_carried(counts, jnp.zeros_like(counts)))
    return as_int32(jnp.sum(digits, axis=1, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnames="limits")
def _leaf(
    x: jax.Array | None, scale: jax.Array, limits: Limits
) -> tuple[jax.Array, jax.Array]:
    """Return the counts of one array and its maximum.

    It is jitted so that arrays of the same shape are traced only once.
    """
    if x is None:
        return jnp.zeros((7, 2), jnp.int32), jnp.zeros((), jnp.float32)
    x = jnp.asarray(x, wide_dtype(dtype_of(x)))
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    parts = [jnp.abs(part) for part in parts]
    bits = [_float32_bits(part) for part in parts]
    nan = functools.reduce(jnp.logical_or, [b > _INF for b in bits])
    finite = functools.reduce(jnp.logical_and, [b < _INF for b in bits])
    # With fast math, XLA compares floats as if all were finite, so the rest become 0.
    parts = [jnp.where(finite, part, 0) for part in parts]
    magnitude = _magnitude(parts)
    scale = scale.astype(magnitude.dtype)
    scaled = _magnitude([part * scale for part in parts])
    # XLA would flush a subnormal limit to zero.
    normal_limit = max(limits.normal, float(jnp.finfo(scaled.dtype).tiny))
    # Cumulative counts, from zero upwards, need the fewest comparisons.
    flags = [
        nan,
        ~finite,
        magnitude == 0,
        scaled <= limits.zero,
        scaled < normal_limit,
        _overflows(scaled, limits),
    ]
    return _sums_and_max(flags, magnitude)


def _float32_bits(x: jax.Array) -> jax.Array:
    """Return the bits of nonnegative numbers; those of NaN are above infinity's."""
    if x.dtype == jnp.float64:
        # Finite numbers stay finite. TPUs cannot return the bits of a float64.
        x = (x * 2.0**-900).astype(jnp.float32)
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _magnitude(parts: list[jax.Array]) -> jax.Array:
    """Return absolute values from those of the real and imaginary parts."""
    if len(parts) == 1:
        return parts[0]
    # For a complex zero XLA divides zero by zero, and fast math misses the NaN.
    longer, shorter = jnp.maximum(*parts), jnp.minimum(*parts)
    ratio = shorter / jnp.maximum(longer, float(jnp.finfo(longer.dtype).tiny))
    return longer * jnp.sqrt(1 + ratio * ratio)


def _overflows(scaled: jax.Array, limits: Limits) -> jax.Array:
    """Return which magnitudes, infinite ones included, have reached the limit."""
    if scaled.dtype == jnp.float64 and math.isfinite(limits.overflow):
        return scaled >= limits.overflow
    with np.errstate(over="ignore"):
        limit = np.float32(limits.overflow)
    if float(limit) < limits.overflow:
        limit = np.nextafter(limit, np.float32(np.inf))
    return _float32_bits(scaled) >= int(limit.view(np.int32))


def _sums_and_max(flags: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Count the flags and all elements, and return the maximum of ``x``.

    The counts are in two digits, of shape (7, 2); the maximum is a finite float32.

    XLA CPU turns one reduction with many operands into one vectorized loop, and many
    reductions into many slow loops. Carrying digits takes ten times as long. So if the
    counts may not fit, the longest axis that still fits is reduced first.
    """
    # As integers, nonnegative floats keep their order, and no NaN needs care.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    operands = [*(flag.astype(jnp.int32) for flag in flags), bits]
    if _fits(x.size):
        *sums, maximum = _reduce(_add, operands, range(x.ndim))
        low = jnp.stack([*sums, jnp.asarray(x.size, jnp.int32)])
        digits = jnp.stack([low, jnp.zeros_like(low)], axis=1)
    else:
        operands.insert(-1, jnp.ones_like(operands[0]))
        short = [axis for axis, length in enumerate(x.shape) if _fits(length)]
        if short:
            longest = max(short, key=lambda axis: x.shape[axis])
            operands = _reduce(_add, operands, [longest])
        *sums, maximum = operands
        pairs = [_carried(low, jnp.zeros_like(low)) for low in sums]
        operands = [*itertools.chain(*pairs), maximum]
        *sums, maximum = _reduce(_add_digits, operands, range(maximum.ndim))
        digits = jnp.stack(sums).reshape(-1, 2)
    maximum = jnp.minimum(maximum, _INF - 1)
    return digits, jax.lax.bitcast_convert_type(maximum, jnp.float32)


def _reduce(
    combine: Callable[[_Operands, _Operands], _Operands],
    operands: _Operands,
    axes: Iterable[int],
) -> _Operands:
    starts = [np.zeros((), np.int32)] * len(operands)
    return list(jax.lax.reduce(operands, starts, combine, tuple(axes)))


def _add(left: _Operands, right: _Operands) -> _Operands:
    sums = [a + b for a, b in zip(left[:-1], right[:-1], strict=True)]
    return [*sums, jnp.maximum(left[-1], right[-1])]


def _add_digits(left: _Operands, right: _Operands) -> _Operands:
    *sums, maximum = _add(left, right)
    pairs = [_carried(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    return [*itertools.chain(*pairs), maximum]


def _carried(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Carry from the lower digit, so that it is in its range again."""
    return low & (2**_BITS - 1), high + (low >> _BITS)


def _fits(number: Any) -> bool:
    """Return whether a number of elements fits int32; a symbolic one might not."""
    return isinstance(number, int) and number <= LARGEST_COUNT
