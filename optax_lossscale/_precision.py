"""The limits of floating-point types and of the loss scale."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
    """Return the limits of a type, by its name, or raise if it has none."""
    dtype, info = jnp.dtype(name), jnp.finfo(name)

    def rounded(x: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.asarray(x, np.float64).astype(dtype))

    if rounded(0.0) != 0 or math.isfinite(rounded(math.inf)):
        raise ValueError(
            "`dtype` must have a zero, and an infinity or NaN that shows an overflow, "
            f'got {name}. Gradients are usually computed in "float16".'
        )
    largest, least = float(info.max), float(info.smallest_subnormal)
    # The tie is half a unit in the last place above the largest number. It rounds to
    # the even neighbor. Usually that is the one above, which overflows, but in
    # float8_e4m3fn it is the largest number.
    tie = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    overflow = tie
    if math.isfinite(rounded(tie)):
        overflow = math.nextafter(tie, math.inf)
    return Limits(least / 2, float(info.tiny) - least / 2, overflow)


def exact_power(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent for a whole exponent; the result must be a normal number."""
    # ``jnp.exp2`` and ``jnp.ldexp`` compute powers, which some devices round poorly.
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return the scale 2**floor(exponent), exactly."""
    lowest, highest = math.log2(SMALLEST_SCALE), math.log2(LARGEST_SCALE)
    return exact_power(jnp.clip(jnp.floor(exponent), lowest, highest).astype(jnp.int32))
