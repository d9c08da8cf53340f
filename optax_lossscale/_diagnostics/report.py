"""What the elements of gradients would be in a narrow type, leaf by leaf."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._finite import AxisName, across
from .._precision import limits_of
from .._tree import dtype_of, is_inexact
from .._validation import check_scale, describe
from .counting import as_int32, measure, total


class GradientReport(NamedTuple):
    """How the elements of gradients fare, as trees like the gradients.

    Each leaf is an array of shape ``()``. Counts are int32 and stay at 2**31 - 1 when
    there are more. No element is counted twice; those in no count are normal numbers.

    Attributes:
        nan: how many elements are NaN.
        inf: how many are infinite.
        zero: how many are zero.
        underflow: how many are not zero, but round to zero in the type at the scale.
        subnormal: how many become subnormal numbers there, which hold fewer digits.
        overflow: how many are finite, but not in the type at the scale.
        max_abs: float32, the largest absolute value of the finite elements, 0 if there
            are none, the largest float32 if it is beyond. It is not multiplied by the
            scale.
        size: how many elements there are; 0 for what is not floating-point.

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
        """The report of all leaves together: sums, and the largest of ``max_abs``."""

        def stacked(leaves: list[Any], dtype: Any) -> jax.Array:
            arrays = [jnp.asarray(x, dtype) for x in leaves]
            return jnp.stack(arrays) if arrays else jnp.zeros(0, dtype)

        return _combined(
            self,
            lambda counts: total(stacked(counts, jnp.int32)),
            lambda maxima: jnp.max(stacked(maxima, jnp.float32), axis=0, initial=0),
        )


def exact_totals(report: GradientReport) -> GradientReport:
    """Return the totals as Python's own numbers, where sums of counts do not saturate.

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

    What counts is the gradient multiplied by ``loss_scale`` and rounded to ``dtype``.

    It answers which parameter overflowed, whether by inf or by NaN, and how much of the
    gradients a lower or higher scale would lose. It compiles, and returns arrays on the
    device without waiting for it; `format_report` makes a table of them.

    Elements that the backward pass has rounded to zero count as zero. To see what a
    type would lose, give gradients that were computed in float32, or at a high scale.
    float32 numbers below 2**-126 count as zero where the device takes them for it, as
    XLA does on CPU. A report is a constant to functions that are differentiated.

    Args:
        grads: true (unscaled) gradients, any pytree of arrays, sharded ones too. Leaves
            that are not floating-point are passed over, with a size of 0. Complex
            elements count by their absolute value, as NaN if either part is NaN, else
            as infinite if either part is.
        loss_scale: what the loss is multiplied by, a number or an array of shape
            ``()``.
        dtype: the floating-point type to which the scaled gradients are rounded, or its
            name.
        axis_name: the mapped axis, or a tuple of them, along which the gradients differ
            or are split. The counts of all devices (``shard_map``, ``pmap``) or members
            (``vmap``) along it are added up.

    Returns:
        A `GradientReport`; one without leaves if ``grads`` has none.

    Raises:
        ValueError: if ``grads`` is a single number, holds something other than arrays,
            or nothing that is floating-point; if ``loss_scale`` is not one number above
            0, ``dtype`` is no floating-point type, or ``axis_name`` is not bound here.

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
        <https://arxiv.org/abs/1710.03740>`_, section 3.2, for what float16 loses.
    """
    limits = limits_of(dtype)
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
    """Put None in the place of what holds no floating-point numbers."""
    return [x if is_inexact(x) else None for x in leaves]


def check_gradients(name: str, tree: Any) -> None:
    """Refuse what can be no tree of gradients, without looking at its elements."""
    arrays = jax.Array | np.ndarray | np.generic | int | float | complex
    if isinstance(tree, arrays) and jnp.ndim(tree) == 0:
        raise ValueError(
            f"`{name}` must be a tree of gradients, got one number: {describe(tree)}. "
            "Is it the loss? Put the gradient of a single parameter into a container, "
            "as in {'x': gradient}."
        )
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    for path, leaf in pairs:
        if not isinstance(leaf, arrays):
            raise ValueError(
                f"`{name}` must hold arrays alone, got {describe(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'its root'}. Leave out what is not "
                "differentiated, or put None in its place."
            )
    if pairs and not any(is_inexact(leaf) for _, leaf in pairs):
        path, leaf = pairs[0]
        raise ValueError(
            f"`{name}` must hold floating-point gradients, got none: "
            f"{dtype_of(leaf)} at {jax.tree_util.keystr(path) or 'its root'}. Are "
            "these the inputs of the loss, or its labels?"
        )
