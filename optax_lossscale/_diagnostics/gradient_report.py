"""Report, per leaf, the elements of gradients that a narrow dtype would lose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._axes import AxisName, reduce_along
from .._dtypes import is_inexact, limits_of
from .._validation import check_dtype, check_scale, describe
from .counting import measure
from .table import GradientReport


def gradient_report(
    grads: Any,
    *,
    loss_scale: "jax.typing.ArrayLike" = 1.0,
    dtype: Any = jnp.float16,
    axis_name: AxisName | None = None,
) -> GradientReport:
    """Count, per gradient array, the elements that underflow or overflow in float16.

    The counts show which parameter overflowed, and how many elements float16 loses.
    `format_report` prints them as a table. `gradient_report` can be jitted, and does
    not wait for the device.

    Args:
        grads: unscaled gradients, any pytree of arrays. Compute them in float32, or at
            a high scale: elements that are already zero count as zero.
        loss_scale: the scale that multiplies the gradients before they are counted, a
            number or an array of shape ``()``.
        dtype: the floating-point dtype, or its name, to which the scaled gradients are
            rounded.
        axis_name: the mapped axis, or a tuple of them, along which the counts of all
            devices (``shard_map``, ``pmap``) or members (``vmap``) are summed.

    Returns:
        A `GradientReport`. It has no leaves if ``grads`` has none.

    Raises:
        ValueError: if ``grads`` holds something other than arrays or no floating-point
            array, or if another argument is not as described.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> report = ls.gradient_report({"w": jnp.array([1e-9, 1e-6, 1.0])})
        >>> int(report.underflow["w"]), int(report.subnormal["w"])
        (1, 1)
    """
    limits = limits_of(check_dtype("dtype", dtype))
    check_scale("loss_scale", loss_scale)
    check_gradients(grads)
    structure = jax.tree.structure(grads)
    counts = measure(grads, loss_scale, limits)
    fields = {name: [x[name] for x in counts] for name in GradientReport._fields}
    max_abs = reduce_along(jax.lax.pmax, fields.pop("max_abs"), axis_name)
    fields = reduce_along(jax.lax.psum, fields, axis_name) | {"max_abs": max_abs}
    return GradientReport(
        **{name: jax.tree.unflatten(structure, x) for name, x in fields.items()}
    )


def check_gradients(grads: optax.Updates) -> None:
    """Raise if this cannot be a tree of gradients, without reading its elements."""
    module = f"{type(grads).__module__}."
    if module.startswith(f"{__package__.partition('.')[0]}."):  # a report, a state
        raise ValueError(
            f"`grads` must be gradients, got a {type(grads).__name__}. Pass the "
            "gradients that `value_and_grad` returns."
        )
    arrays = jax.Array | np.ndarray | np.generic | int | float | complex
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    for path, leaf in leaves:
        if not isinstance(leaf, arrays):
            raise ValueError(
                f"`grads` must hold only arrays, got {describe(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'its root'}. Leave out leaves that "
                "are not differentiated, or replace them with None."
            )
    if leaves and not any(is_inexact(leaf) for _, leaf in leaves):
        raise ValueError(
            f"`grads` must hold floating-point gradients, got {describe(grads)} "
            "without any. Did you pass the inputs of the loss, or its labels?"
        )
