"""Check that a tree is finite, and measure how large it is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._axes import AxisName, all_along, check_axis_name, reduce_along
from ._dtypes import dtype_of, is_inexact, wide_dtype
from ._jax_internals import has_plain_type

# The scope of the matmul in a check, by which a report leaves that matmul out.
CHECK_SCOPE = "optax_lossscale_check"
INF_BITS = int(np.float32(np.inf).view(np.int32))


def all_finite(tree: Any, *, axis_name: AxisName | None = None) -> jax.Array:
    """Return whether all floating-point elements of a tree are finite.

    Use it for values other than gradients, or if you call the ``update`` of a rule
    yourself. `with_loss_scaling` checks the gradients.

    Args:
        tree: any pytree. Leaves that cannot hold a NaN, such as integers, are finite.
        axis_name: the mapped axis, or a tuple of axes. The result is then True only if
            the elements are finite everywhere along it.

    Returns:
        A boolean array of shape ``()``.

    Raises:
        ValueError: if ``axis_name`` is not an axis of a surrounding mapped function.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.all_finite({"w": jnp.ones(3), "b": jnp.array(jnp.nan)})
        Array(False, dtype=bool)
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    return all_along(_all_finite(leaves), axis_name)


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    parts = [y for x in leaves for y in _real_parts(x)]
    floats = [x for x in parts if x.dtype == jnp.float32]
    flags = [_any(is_nonfinite(x)) for x in parts if x.dtype != jnp.float32]
    sums = _sums([x for x in floats if not _row_length(x)])
    if large := [x for x in floats if _row_length(x)]:
        sums += jax.lax.platform_dependent(large, cpu=_sums_by_rows, default=_sums)
    scores = [jnp.stack(flags)] if flags else []
    if sums:
        scores.append(is_nonfinite(jnp.stack(sums)).astype(jnp.float32))
    return _are_zero(scores)


def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return a number for each array, which is finite if the array is."""
    # The factors differ, because XLA on a CPU writes an array of factors that several
    # sums share.
    factors = (2.0**-126 * (1 + 2.0**-23 * i) for i in range(len(arrays)))
    return [_sum(x, factor) for x, factor in zip(arrays, factors, strict=True)]


def _sum(x: jax.Array, factor: float) -> jax.Array:
    """Return a number that is finite if a float32 array is.

    It is the largest magnitude of few numbers, and a sum of small multiples of many,
    each below 8 if finite. A sum needs no temporary memory on a CPU, where XLA would
    write flags to memory, and no pass of its own beside a global norm. ``x - x`` would
    do as well as addends, but a compiler with fast math folds it:
    https://github.com/jax-ml/jax/issues/276.
    """
    if isinstance(x.size, int) and x.size <= 1024:
        # XLA on a CPU adds few floats up one by one, but not so a maximum of integers.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
        return jax.lax.bitcast_convert_type(_largest(bits), jnp.float32)
    return jnp.sum(x * np.float32(factor))


def _sums_by_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return sums by matmuls, in which XLA on a CPU reads twice as fast."""
    return [_sum_by_rows(x, _row_length(x)) for x in arrays]


def _sum_by_rows(x: jax.Array, length: int) -> jax.Array:
    factors = jnp.full(length, 2.0**-126, jnp.float32)
    with jax.named_scope(CHECK_SCOPE):
        rows = jnp.matmul(x.reshape(-1, length), factors, precision="highest")
    return jnp.sum(rows)


def _row_length(x: jax.Array) -> int:
    """Return the length of the rows in which to sum up an array, or 0 for no rows.

    A matmul takes longer to compile, and each row takes memory for its sum. Of several
    CPU devices, each may hold a part of a row.
    """
    # A size that `jax.export` leaves open is no int.
    is_large = isinstance(x.size, int) and x.size >= 2**17
    if not is_large or jax.device_count("cpu") > 1 or not has_plain_type(x):
        return 0
    return next((n for n in range(4096, 255, -1) if x.size % n == 0), 0)


def _real_parts(x: jax.Array) -> list[jax.Array]:
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def none_is_true(flags: list[jax.Array]) -> jax.Array:
    """Return whether all elements of some boolean arrays are False."""
    return _are_zero([jnp.stack([*map(_any, flags)])] if flags else [])


def _any(flags: jax.Array) -> jax.Array:
    # On CPUs, the maximum of small integers is the fastest reduction of flags.
    return _largest(flags.astype(jnp.uint8)).astype(jnp.float32)


def _largest(x: jax.Array) -> jax.Array:
    """Return the maximum, of no elements the lowest number of the dtype."""
    return jax.lax.reduce_max(x, tuple(range(x.ndim)))


def _are_zero(scores: list[jax.Array]) -> jax.Array:
    if not scores:
        return jnp.ones((), jnp.bool_)
    joined = jnp.concatenate(scores)
    # XLA fuses cheap operations into each consumer, so the mask of every leaf would
    # combine the flags of all leaves again. It does not do so with a dot. On a GPU, it
    # merges kernels of arrays of one shape if they share a vector, but not if they
    # share a scalar. So the flag is an element of a vector of two.
    with jax.named_scope(CHECK_SCOPE):
        return (joined @ jnp.stack([joined, joined], axis=1) == 0)[0]


def is_nonfinite(x: jax.Array) -> jax.Array:
    """Return which elements are NaN or infinite, under any flag of the compiler."""
    if jnp.iscomplexobj(x):
        return is_nonfinite(x.real) | is_nonfinite(x.imag)
    bits = jnp.finfo(x.dtype).bits
    if bits < 16:
        x = x.astype(jnp.float32)  # small types encode NaN and infinity in many ways
    elif bits == 64:
        # Finite numbers stay finite. TPUs cannot return the bits of a float64.
        x = (x * 2.0**-900).astype(jnp.float32)
    integer = np.dtype(f"int{jnp.finfo(x.dtype).bits}")
    exponent = np.asarray(np.inf, x.dtype).view(integer)
    return jax.lax.bitcast_convert_type(x, integer) & exponent == exponent


def max_magnitude(tree: Any, *, axis_name: AxisName | None = None) -> jax.Array:
    """Return the largest absolute value of the floating-point elements of a tree.

    Use it if you call the ``update`` of a rule such as `HeadroomLossScale` yourself.

    Args:
        tree: any pytree. Leaves that `all_finite` ignores are ignored.
        axis_name: as for `all_finite`.

    Returns:
        A float32 array of shape ``()``: 0 if there are no elements, NaN if any element
        is NaN, finite if all elements are finite.

    Raises:
        ValueError: as `all_finite`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.max_magnitude({"w": jnp.array([0.5, -3.0]), "b": jnp.zeros(2)})
        Array(3., dtype=float32)
    """
    check_axis_name(axis_name)
    return _max_magnitude([*filter(is_inexact, jax.tree.leaves(tree))], axis_name)


@functools.partial(jax.jit, static_argnames="axis_name")
def _max_magnitude(leaves: list[jax.Array], axis_name: AxisName | None) -> jax.Array:
    # On CPU, XLA drops NaN from a maximum of floats. A maximum of their bits would keep
    # NaN, but XLA would write all the bits to memory first.
    # https://github.com/openxla/xla/issues/21461
    no_nan = none_is_true([magnitude_bits(x) > INF_BITS for x in leaves])
    largest = finite_max_magnitude(leaves, axis_name)
    return jnp.where(all_along(no_nan, axis_name), largest, jnp.nan)


def finite_max_magnitude(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Return `max_magnitude` of a finite tree, at half of the cost on a CPU."""
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    magnitudes = [jnp.max(magnitude(x), initial=0) for x in leaves]
    largest = jnp.max(jnp.stack([*magnitudes, jnp.zeros((), jnp.float32)]))
    return reduce_along(jax.lax.pmax, largest, axis_name)


def magnitude_bits(x: Any) -> jax.Array:
    """Return the bits of magnitudes: integers in the same order, NaN above infinity."""
    return magnitude(x).view(jnp.int32)


def magnitude(x: Any) -> jax.Array:
    x = jnp.asarray(x, wide_dtype(dtype_of(x)))
    magnitude = jnp.abs(x)
    if x.dtype != jnp.float32:
        # The absolute value of a finite complex number may be infinite.
        clipped = jnp.minimum(magnitude, float(jnp.finfo(jnp.float32).max))
        magnitude = jnp.where(jnp.isfinite(x), clipped, magnitude)
    return magnitude.astype(jnp.float32)
