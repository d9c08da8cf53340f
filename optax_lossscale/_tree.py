"""Arithmetic on pytrees: is it finite, undo the scale, choose between two."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from ._validation import check_flag

AxisName = Hashable | tuple[Hashable, ...]


def all_finite(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Return whether no floating-point element of a tree is NaN or infinite.

    Complex leaves count by both parts. Integers, booleans, PRNG keys and ``float0``
    are always finite, and so is a tree without leaves. float8_e4m3fn has no infinity
    and float4 neither: there an overflow that saturates cannot be seen.

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
    finite = _all_finite(leaves) if leaves else jnp.ones((), jnp.bool_)
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
    try:
        return reduce(x, axis_name)
    except NameError as error:
        raise ValueError(
            "`axis_name` must name an axis of the surrounding `shard_map`, `pmap` or "
            f"`vmap(axis_name=...)`, got {axis_name!r}. Under plain `jit` leave it "
            "out: there arrays are global and so is the check."
        ) from error


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    scores = jnp.stack([_nonfinite_score(x) for x in leaves])
    # A flag that is cheap to combine would be combined again, from all leaves, in the
    # mask of every leaf: XLA fuses cheap operations into each consumer. A dot it keeps.
    return jnp.vdot(scores, scores) == 0


def _nonfinite_score(x: jax.Array) -> jax.Array:
    """Return 0 if every element is finite, else 1 or NaN, as float32."""
    if jnp.iscomplexobj(x):
        return _nonfinite_score(x.real) + _nonfinite_score(x.imag)
    if jnp.finfo(x.dtype).bits >= 32 or x.dtype == jnp.bfloat16:
        # x - x is 0 or NaN, so the sum cannot overflow, and XLA CPU, slow at flags,
        # takes sums at memory speed.
        return jnp.sum(x - x, dtype=wide_dtype(x.dtype)).astype(jnp.float32)
    # A sum would write float32 copies out first. Of the reductions of flags the
    # maximum of small integers is the fastest on XLA CPU.
    return jnp.max((~jnp.isfinite(x)).astype(jnp.uint8), initial=0).astype(jnp.float32)


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
    magnitude = jnp.max(jnp.abs(x), initial=0)
    largest = jnp.finfo(jnp.float32).max
    clipped = jnp.minimum(magnitude, jnp.asarray(largest, magnitude.dtype))
    magnitude = jnp.where(jnp.isfinite(magnitude), clipped, magnitude)
    return magnitude.astype(jnp.float32)


def select(pred: jax.typing.ArrayLike, on_true: Any, on_false: Any) -> Any:
    """Choose between two trees of the same structure: ``jnp.where``, leaf by leaf.

    For what the optimizer cannot protect in a step with non-finite gradients:
    BatchNorm statistics, moving averages, PRNG keys, counters.

    Args:
        pred: one boolean, as `all_finite` returns.
        on_true: any pytree of arrays, typed PRNG keys included.
        on_false: a pytree of the same structure.

    Returns:
        ``on_true`` where ``pred`` is True, ``on_false`` where it is False.

    Raises:
        ValueError: if ``pred`` is not one boolean or the structures differ.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> old, new = {"mean": jnp.zeros(2)}, {"mean": jnp.array([1.0, jnp.inf])}
        >>> ls.select(ls.all_finite(new), new, old)
        {'mean': Array([0., 0.], dtype=float32)}
    """
    check_flag("pred", pred)
    if not same_structure(on_true, on_false):
        raise ValueError(
            "`on_true` and `on_false` must have the same structure, got "
            f"{jax.tree.structure(on_true)} and {jax.tree.structure(on_false)}. "
            "Select before adding or removing entries."
        )
    return jax.tree.map(lambda t, f: jnp.where(pred, t, f), on_true, on_false)


def unscale(tree: Any, scale: jax.Array) -> Any:
    """Multiply by the scale's reciprocal, in float32 or wider."""

    def leaf(x: Any) -> Any:
        if not is_inexact(x):
            return x
        x = jnp.asarray(x, wide_dtype(dtype_of(x)))
        if jnp.iscomplexobj(x):
            # A complex product with 0 * inf in it would turn inf into NaN.
            return jax.lax.complex(leaf(x.real), leaf(x.imag))
        return x * (1 / scale.astype(x.dtype))

    return jax.tree.map(leaf, tree)


def wide_dtype(dtype: Any) -> Any:
    """Return float32 for narrower types, others as they are.

    ``jnp.promote_types`` knows no float8, and refuses under strict promotion.
    """
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def same_structure(tree: Any, other: Any) -> bool:
    structure: Any = jax.tree.structure(tree)
    return structure == jax.tree.structure(other)


def is_inexact(x: Any) -> bool:
    """Return whether a leaf is an array or number that can hold a NaN."""
    return jnp.issubdtype(dtype_of(x), jnp.inexact)


def dtype_of(x: Any) -> Any:
    """Return a leaf's dtype; ``jnp.result_type`` knows neither PRNG keys nor float0."""
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
