"""Floating-point types: their limits and casts, and the range of the loss scale."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# An array, perhaps abstract or of NumPy, a number, or what else a tree may hold.
Leaf = Any

# Within these bounds, a float32 scale and its reciprocal are normal numbers. XLA
# flushes subnormal numbers to zero, and gradients multiplied by zero look finite.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


class Limits(NamedTuple):
    """The limits for rounding a magnitude to a type, to nearest with ties to even."""

    zero: float  # the largest magnitude that rounds to zero
    normal: float  # the smallest magnitude that rounds to a normal number
    overflow: float  # the smallest float64 that overflows


@functools.cache
def limits_of(name: str) -> Limits:
    """Return the limits of a type, by its name."""
    dtype, info = jnp.dtype(name), jnp.finfo(name)
    largest, least = float(info.max), float(info.smallest_subnormal)
    # The tie is half a unit in the last place above the largest value. It rounds to
    # the even neighbor. Usually that is the one above, which overflows, but in
    # float8_e4m3fn it is the largest value.
    tie = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    with np.errstate(over="ignore"):
        holds_tie = math.isfinite(np.float64(tie).astype(dtype))
    overflow = math.nextafter(tie, math.inf) if holds_tie else tie
    return Limits(least / 2, float(info.tiny) - least / 2, overflow)


def largest_power(magnitude: jax.Array, bound: float) -> jax.Array:
    """Return the largest power of two that keeps a float32 magnitude within a bound.

    It is from 2**-126 to 2**126.
    """
    # Logarithms, ``jnp.exp2`` and ``jnp.ldexp`` are inexact on some devices. The
    # exponent of a positive float32 is in its bits from the 24th on. The mantissa is
    # below it, so that a difference of bits rounds down to a whole exponent.
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
    exponent = (int(np.float32(bound).view(np.int32)) - bits) >> 23
    bits = (jnp.clip(exponent, -126, 126) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def grad_dtype(dtype: Any) -> Any:
    """Return the dtype of unscaled gradients: float32 for float16 and float8.

    bfloat16 has the range of float32, so its gradients stay bfloat16.
    """
    return dtype if dtype == jnp.bfloat16 else wide_dtype(dtype)


def loses_range(x: Leaf) -> bool:
    """Return whether a leaf is float16 or float8, whose gradients are float32."""
    return is_inexact(x) and grad_dtype(dtype_of(x)) != dtype_of(x)


def widen(tree: Any) -> Any:
    """Return a tree whose float16 and float8 leaves are float32."""
    return jax.tree.map(
        lambda x: as_type(x, jnp.float32) if loses_range(x) else x, tree
    )


def wide_dtype(dtype: Any) -> Any:
    """Return float32 for narrower types, and other types unchanged.

    ``jnp.promote_types`` does not support float8, and raises under strict promotion.
    """
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def as_type(x: Leaf, dtype: Any) -> Leaf:
    """Cast a leaf, which may be abstract."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def is_inexact(x: Leaf) -> bool:
    """Return whether a leaf is an array or number that can be NaN."""
    number = hasattr(x, "dtype") or isinstance(x, float | complex)
    return number and jnp.issubdtype(dtype_of(x), jnp.inexact)


def dtype_of(x: Leaf) -> Any:
    """Return a leaf's dtype in JAX, which may be a PRNG key's or ``float0``."""
    if not hasattr(x, "dtype"):
        return jnp.result_type(x)
    # Unless float64 is enabled, JAX converts float64 arrays of NumPy to float32.
    of_numpy = isinstance(x, np.ndarray | np.generic) and np.issubdtype(
        x.dtype, np.number
    )
    return jax.dtypes.canonicalize_dtype(x.dtype) if of_numpy else x.dtype
