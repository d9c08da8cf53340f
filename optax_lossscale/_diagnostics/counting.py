"""Count, on the device, the elements of gradients that a narrow dtype would lose."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import Leaf, Limits, dtype_of, is_inexact, wide_dtype
from .._finite import INF_BITS, magnitude_bits

# The kinds of elements, in the order in which ``_measure_leaf`` counts them.
_KINDS = ("nan", "inf", "zero", "underflow", "subnormal", "normal", "overflow")

# Numbers by their names, float32 arrays of shape ``()``.
Counts = dict[str, jax.Array]


def measure(
    grads: optax.Updates, loss_scale: jax.typing.ArrayLike, limits: Limits
) -> list[Counts]:
    """Return ``size``, ``max_abs`` and the count of each kind, per leaf."""
    nothing = np.zeros(0, np.float32)
    leaves = [x if is_inexact(x) else nothing for x in jax.tree.leaves(grads)]
    scale = jnp.asarray(loss_scale, jnp.float32)
    # XLA compiles many arrays in quadratic time, so each has a program of its own.
    return [_measure_leaf(x, scale, limits) for x in leaves]


@jax.jit
def add_up(counts: list[Counts]) -> Counts:
    """Return the sums, and the largest maximum; zeros if there are no leaves."""
    counts = counts or [dict.fromkeys((*_KINDS, "size", "max_abs"), jnp.float32(0))]
    stacked = {name: jnp.stack([x[name] for x in counts]) for name in counts[0]}
    max_abs = jnp.max(stacked.pop("max_abs"), axis=0)
    return {name: _sum(x) for name, x in stacked.items()} | {"max_abs": max_abs}


def _sum(x: jax.Array) -> jax.Array:
    """Sum in pairs, which keeps float32 sums of counts exact for longest."""
    while len(x) > 1:
        x = jnp.concatenate([x, jnp.zeros_like(x[: len(x) % 2])])
        x = x[::2] + x[1::2]
    return x[0]


@functools.partial(jax.jit, static_argnames="limits")
def _measure_leaf(x: Leaf, scale: jax.Array, limits: Limits) -> Counts:
    # Where the gradients are differentiated, the result is a constant.
    x, scale = jax.lax.stop_gradient((x, scale))
    x = jnp.asarray(x, wide_dtype(dtype_of(x)))
    parts = [jnp.abs(y) for y in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    bits = functools.reduce(jnp.maximum, map(magnitude_bits, parts))
    # With fast math, XLA compares floats as if all were finite, so make them finite.
    parts = [jnp.where(bits < INF_BITS, part, 0) for part in parts]
    magnitude = functools.reduce(jnp.hypot, parts)
    scale = scale.astype(magnitude.dtype)
    scaled = functools.reduce(jnp.hypot, [part * scale for part in parts])
    # XLA flushes a subnormal limit to zero.
    normal = max(limits.normal, float(jnp.finfo(scaled.dtype).tiny))
    # Each flag includes those before it, which takes the fewest comparisons.
    flags = [
        bits > INF_BITS,
        bits >= INF_BITS,
        magnitude == 0,
        scaled <= limits.zero,
        scaled < normal,
        ~_overflows(scaled, limits),
    ]
    # As integers, nonnegative floats keep their order, and no NaN needs care.
    operands = [flag.astype(jnp.uint32) for flag in flags]
    operands.append(magnitude.astype(jnp.float32).view(jnp.uint32))
    # On a CPU, XLA would write the addends of each sum to memory, 28 bytes for each
    # gradient. One reduction of all writes none.
    starts = [np.uint32(0)] * len(operands)
    axes = range(x.ndim)
    *included, largest = jax.lax.reduce(operands, starts, _add_and_maximum, axes)
    size = jnp.asarray(x.size, jnp.uint32)
    counts = (b - a for a, b in itertools.pairwise([jnp.uint32(0), *included, size]))
    return {
        **{k: n.astype(jnp.float32) for k, n in zip(_KINDS, counts, strict=True)},
        "size": jnp.asarray(x.size, jnp.float32),
        "max_abs": jnp.minimum(largest, INF_BITS - 1).view(jnp.float32),
    }


def _add_and_maximum(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    sums = [a + b for a, b in zip(left[:-1], right[:-1], strict=True)]
    return [*sums, jnp.maximum(left[-1], right[-1])]


def _overflows(scaled: jax.Array, limits: Limits) -> jax.Array:
    """Return which magnitudes, infinite ones included, have reached the limit."""
    if scaled.dtype == jnp.float64 and math.isfinite(limits.overflow):
        return scaled >= limits.overflow
    with np.errstate(over="ignore"):
        limit = np.float32(limits.overflow)
    if float(limit) < limits.overflow:  # it is rounded down
        limit = np.nextafter(limit, np.float32(np.inf))
    return magnitude_bits(scaled) >= int(limit.view(np.int32))
