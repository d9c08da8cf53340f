"""Are the elements of a tree finite, and how large are they, on one device or many?"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import dtype_of, is_inexact, wide_dtype

AxisName = Hashable | tuple[Hashable, ...]


def all_finite(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Return whether no floating-point element of a tree is NaN or infinite.

    Complex leaves count by both parts. Integers, booleans, PRNG keys and ``float0``
    are always finite, and so is a tree without leaves. float8_e4m3fn has no infinity
    and float4 neither: there an overflow that saturates cannot be seen.

    Flags in ``XLA_FLAGS`` that let the compiler forget NaN, such as
    ``--xla_cpu_enable_fast_math``, are noticed, and the bits are compared then. Do not
    give such flags to a single program by ``compiler_options`` of ``jax.jit``: there
    they cannot be noticed, and hide NaN.

    Args:
        tree: any pytree of arrays.
        axis_name: the mapped axis, or a tuple of them, over which the answers of all
            devices (``shard_map``, ``pmap``) or members (``vmap``) are combined.

    Returns:
        A boolean array of shape ``()``; with ``axis_name``, the same everywhere.

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


def across(
    reduce: Callable[[jax.Array, AxisName], jax.Array],
    x: jax.Array,
    axis_name: AxisName | None,
) -> jax.Array:
    """Combine what the devices along the mapped axes have."""
    if axis_name is None:
        return x
    check_axis_name(axis_name)
    return reduce(x, axis_name)


def check_axis_name(axis_name: AxisName) -> None:
    """Refuse a name, or a tuple with a name, that is not bound here."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        # An integer would name an axis of the array. Only of a number that is no array
        # does jax say the same in all kinds of mapped functions.
        if all(not isinstance(name, int) for name in names):
            jax.lax.psum(1, axis_name)
            return
        unbound = None
    except NameError as error:
        unbound = error
    raise ValueError(
        "`axis_name` must name an axis of the surrounding `shard_map`, `pmap` or "
        f"`vmap(axis_name=...)`, got {axis_name!r}. Under plain `jit` leave it "
        "out: there arrays are global and so is the check."
    ) from unbound


@functools.partial(jax.jit, static_argnames="by_sums")
def _all_finite(leaves: list[jax.Array], by_sums: bool) -> jax.Array:
    return _are_zero([_nonfinite_score(x, by_sums) for x in leaves])


def none_is_true(flags: list[jax.Array]) -> jax.Array:
    """Return whether all elements of some boolean arrays are False."""
    return _are_zero([_any(x) for x in flags]) if flags else jnp.ones((), jnp.bool_)


def _are_zero(scores: list[jax.Array]) -> jax.Array:
    stacked = jnp.stack(scores)
    # A flag that is cheap to combine would be combined again, from all leaves, in the
    # mask of every leaf: XLA fuses cheap operations into each consumer. A dot it keeps.
    return jnp.vdot(stacked, stacked) == 0


def _any(flags: jax.Array) -> jax.Array:
    # Of the reductions of flags the maximum of small integers is the fastest on CPUs.
    return jnp.max(flags.astype(jnp.uint8), initial=0).astype(jnp.float32)


def _nonfinite_score(x: jax.Array, by_sums: bool) -> jax.Array:
    """Return 0 if every element is finite, else 1 or NaN, as float32."""
    if jnp.iscomplexobj(x):
        real, imag = (_nonfinite_score(part, by_sums) for part in (x.real, x.imag))
        return real + imag
    if by_sums and jnp.finfo(x.dtype).bits >= 32:
        # x - x is 0 or NaN, so the sum cannot overflow, and XLA CPU, slow at flags,
        # takes sums at memory speed.
        return jnp.sum(x - x).astype(jnp.float32)
    # XLA CPU would write the float32 addends of narrower types out first.
    return _any(is_nonfinite(x))


def is_nonfinite(x: jax.Array) -> jax.Array:
    """Compare bits, of which no compiler assumes that there are no NaN."""
    if jnp.finfo(x.dtype).bits < 16:
        x = x.astype(jnp.float32)  # the small types write NaN and infinity in many ways
    integer = np.dtype(f"int{jnp.finfo(x.dtype).bits}")
    exponent = np.asarray(np.inf, x.dtype).view(integer)
    return jax.lax.bitcast_convert_type(x, integer) & exponent == exponent


@functools.cache
def _sums_show_nan() -> bool:
    """Return whether XLA is left to compute x - x as IEEE 754 has it.

    With ``--xla_cpu_enable_fast_math`` in ``XLA_FLAGS`` it takes the difference for 0.
    The flags hold for the whole process, so one small program tells.
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

    The result says nothing about NaN, which XLA CPU loses in a maximum: ask
    `all_finite` as well.

    Args:
        tree: any pytree of arrays. What `all_finite` passes over does not count here.
        axis_name: the mapped axis, or a tuple of them, over whose devices or members
            the maximum is taken.

    Returns:
        A float32 array of shape ``()``; 0 for a tree without elements, the largest
        float32 for anything finite beyond it.

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
        # Both parts may be finite where the absolute value is beyond the largest float.
        largest = jnp.finfo(magnitude.dtype).max
        finite = jnp.isfinite(x)
        magnitude = jnp.where(finite, jnp.minimum(magnitude, largest), magnitude)
    magnitude = jnp.max(magnitude, initial=0)
    float32_max = jnp.asarray(jnp.finfo(jnp.float32).max, magnitude.dtype)
    clipped = jnp.minimum(magnitude, float32_max)
    magnitude = jnp.where(jnp.isfinite(magnitude), clipped, magnitude)
    return magnitude.astype(jnp.float32)
