"""Report, per leaf, what a narrow type would lose of the gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._finite import across
from .._tree import dtype_of, is_inexact
from .._validation import AxisName, check_limits, check_scale, describe
from .counting import as_int32, measure, total


class GradientReport(NamedTuple):
    """The result of `gradient_report`: one number per leaf of the gradients.

    Each field is a tree with the structure of the gradients, and each leaf of it is an
    array of shape ``()``. Counts are int32 and saturate at 2**31 - 1. No element is
    counted twice; an element in none of the counts is a normal number.

    Attributes:
        nan: the number of elements that are NaN.
        inf: the number of elements that are infinite.
        zero: the number of elements that are zero.
        underflow: the number of nonzero elements that round to zero in ``dtype`` after
            scaling.
        subnormal: the number of elements that become subnormal there, and so lose
            digits.
        overflow: the number of finite elements that become infinite or NaN there.
        max_abs: float32, the largest absolute value of the finite elements, before
            scaling; 0 if there are none, and at most the largest float32.
        size: the number of elements; 0 for leaves that are not floating-point.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> grads = {"w": jnp.array([1.0, jnp.nan, jnp.nan]), "b": jnp.zeros(2)}
        >>> report = ls.gradient_report(grads)
        >>> int(report.nan["w"]), int(report.totals.nan), int(report.totals.size)
        (2, 2, 5)
    """

    nan: Any
    inf: Any
    zero: Any
    underflow: Any
    subnormal: Any
    overflow: Any
    max_abs: Any
    size: Any

    @property
    def totals(self) -> "GradientReport":
        """The report of all leaves together: summed counts, the largest ``max_abs``."""

        def stacked(leaves: list[Any], dtype: Any) -> jax.Array:
            arrays = [jnp.asarray(x, dtype) for x in leaves]
            return jnp.stack(arrays) if arrays else jnp.zeros(0, dtype)

        return _combined(
            self,
            lambda counts: total(stacked(counts, jnp.int32)),
            lambda maxima: jnp.max(stacked(maxima, jnp.float32), axis=0, initial=0),
        )


def exact_totals(report: GradientReport) -> GradientReport:
    """Return the totals as Python numbers, whose sums do not saturate.

    It waits for the device.
    """
    return _combined(
        jax.device_get(report),
        lambda counts: sum(map(int, counts)),
        lambda maxima: max(map(float, maxima), default=0.0),
    )


def _combined(
    report: GradientReport,
    add: Callable[[list[Any]], Any],
    largest: Callable[[list[Any]], Any],
) -> GradientReport:
    leaves = {name: jax.tree.leaves(tree) for name, tree in report._asdict().items()}
    max_abs = largest(leaves.pop("max_abs"))
    counts = {name: add(numbers) for name, numbers in leaves.items()}
    return GradientReport(**counts, max_abs=max_abs)


def gradient_report(
    grads: Any,
    *,
    loss_scale: jax.typing.ArrayLike = 1.0,
    dtype: Any = jnp.float16,
    axis_name: AxisName | None = None,
) -> GradientReport:
    """Count, per leaf, the elements that underflow, become subnormal or overflow.

    The counts are for gradients multiplied by ``loss_scale`` and rounded to ``dtype``.
    They show which parameter overflowed, whether to inf or NaN, and how much of the
    gradients a lower or a higher scale would lose. `format_report` prints them as a
    table.

    Pass gradients that were computed in float32, or at a high scale. Elements that the
    backward pass has already rounded to zero count as zero, not as underflow.

    It can be jitted, and returns arrays on the device without waiting for it. In a
    function that is differentiated, the report is a constant. If the device flushes
    float32 numbers below 2**-126 to zero, as XLA does on CPU, they count as zero.

    Args:
        grads: true (unscaled) gradients, any pytree of arrays, which may be sharded.
            Leaves that are not floating-point are ignored and have a size of 0. A
            complex element is counted by its absolute value. It counts as NaN if either
            part is NaN, and otherwise as infinite if either part is infinite.
        loss_scale: the loss scale, a number or an array of shape ``()``.
        dtype: the floating-point type to which the scaled gradients are rounded, or its
            name.
        axis_name: the mapped axis, or a tuple of them, along which the gradients differ
            or are sharded. The counts are summed over the devices (``shard_map``,
            ``pmap``) or members (``vmap``) along it.

    Returns:
        A `GradientReport`. It has no leaves if ``grads`` has none.

    Raises:
        ValueError: if ``grads`` is a single number, holds something other than arrays,
            or holds no floating-point array; if ``loss_scale`` is not one number above
            0; if ``dtype`` is not a floating-point type; or if ``axis_name`` is not
            bound here.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> grads = {"w": jnp.array([1e-9, 1e-6, 1.0])}
        >>> report = ls.gradient_report(grads)
        >>> int(report.underflow["w"]), int(report.subnormal["w"])
        (1, 1)
        >>> report = ls.gradient_report(grads, loss_scale=2.0**17)
        >>> int(report.underflow["w"]), int(report.overflow["w"])
        (0, 1)

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2 (what float16 loses)
    """
    limits = check_limits(dtype)
    check_scale("loss_scale", loss_scale)
    check_gradients("grads", grads)
    leaves, structure = jax.tree.flatten(grads)
    if not leaves:
        return GradientReport(*(grads for _ in GradientReport._fields))
    scale = jnp.asarray(loss_scale, jnp.float32)
    counts, max_abs = measure(measurable(leaves), scale, limits)
    counts = as_int32(across(jax.lax.psum, counts, axis_name))
    max_abs = across(jax.lax.pmax, max_abs, axis_name)
    nan, inf, zero, underflow, subnormal, overflow, size, max_abs = (
        jax.tree.unflatten(structure, list(column)) for column in (*counts, max_abs)
    )
    return GradientReport(nan, inf, zero, underflow, subnormal, overflow, max_abs, size)


def measurable(leaves: list[Any]) -> list[Any]:
    """Replace leaves that are not floating-point with None."""
    return [x if is_inexact(x) else None for x in leaves]


def check_gradients(name: str, tree: Any) -> None:
    """Raise if this cannot be a tree of gradients, without reading its elements."""
    arrays = jax.Array | np.ndarray | np.generic | int | float | complex
    if isinstance(tree, arrays) and jnp.ndim(tree) == 0:
        raise ValueError(
            f"`{name}` must be a tree of gradients, got one number: {describe(tree)}. "
            "Is it the loss? If it is the gradient of one parameter, put it into a "
            "container: {'x': gradient}."
        )
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    for path, leaf in pairs:
        if not isinstance(leaf, arrays):
            raise ValueError(
                f"`{name}` must hold only arrays, got {describe(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'its root'}. Leave out what is not "
                "differentiated, or replace it with None."
            )
    if pairs and not any(is_inexact(leaf) for _, leaf in pairs):
        path, leaf = pairs[0]
        raise ValueError(
            f"`{name}` must hold floating-point gradients, got none: "
            f"{dtype_of(leaf)} at {jax.tree_util.keystr(path) or 'its root'}. Did you "
            "pass the inputs of the loss, or its labels?"
        )
