"""Where the numbers of a floating-point type end, and where scales do."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._validation import check_float_dtype

# Inside these bounds a float32 scale and its reciprocal are both normal numbers. XLA
# flushes subnormal ones to zero, and gradients multiplied by zero look finite.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


class Limits(NamedTuple):
    """What becomes of a magnitude that is rounded to a type, to nearest, ties to even.

    Attributes:
        zero: the largest that becomes zero.
        normal: the least that becomes a normal number.
        overflow: the least float64 that is more than the type can hold.
    """

    zero: float
    normal: float
    overflow: float


def limits_of(dtype: Any) -> Limits:
    """Return the limits of a type that a user names, or say why it has none."""
    advice = 'It is the type that gradients are computed in, usually "float16".'
    return _limits_of(check_float_dtype("dtype", dtype, advice).name)


@functools.cache
def _limits_of(name: str) -> Limits:
    dtype, info = jnp.dtype(name), jnp.finfo(name)

    def rounded(x: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.asarray(x, np.float64).astype(dtype))

    if rounded(0.0) != 0 or math.isfinite(rounded(math.inf)):
        raise ValueError(
            "`dtype` must have a zero, and an infinity or a NaN to show an overflow, "
            f'got {name}. Gradients are usually computed in "float16".'
        )
    largest, least = float(info.max), float(info.smallest_subnormal)
    # Half a unit in the last place above the largest number lies a tie, which goes to
    # the even neighbor: usually that is the missing one, but not in float8_e4m3fn.
    tie = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    overflow = tie
    if math.isfinite(rounded(tie)):
        overflow = math.nextafter(tie, math.inf)
    return Limits(least / 2, float(info.tiny) - least / 2, overflow)
