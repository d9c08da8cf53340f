"""The loss scale over the steps."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._validation import check_concrete, describe
from ._common import BLUE, RED, TRACED, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_loss_scale(
    scales: npt.ArrayLike,
    skipped: npt.ArrayLike | None = None,
    ax: "Axes | None" = None,
    **style: Any,
) -> "Axes":
    """Draw the loss scale over the steps, on a log2 axis, with skipped steps marked.

    Call it once more with the same ``ax`` and another ``label`` to compare runs.

    Args:
        scales: the scale that each step used, of shape ``(steps,)``, above 0.
        skipped: one boolean a step, whether it was skipped, of the same shape.
        ax: the matplotlib ``Axes`` to draw on; by default those of a new figure.
        style: passed on to ``Axes.step``, such as ``label`` or ``color``.

    Returns:
        The ``Axes``.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if ``scales`` is not one-dimensional, or holds something other than
            numbers above 0; if ``skipped`` is not of its shape, or not boolean.

    Examples:
        >>> import optax_lossscale as ls
        >>> axes = ls.plots.plot_loss_scale([1024.0, 2048.0], [False, True])
        >>> axes.get_yscale()
        'log'
    """
    check_concrete("scales", scales, TRACED)
    values = np.asarray(scales)
    numeric = np.issubdtype(values.dtype, np.number)
    if values.ndim != 1 or not numeric or not np.all((values > 0) & (values < np.inf)):
        raise ValueError(
            "`scales` must be numbers above 0, one for each step, got "
            f"{describe(scales)}. Collect `get_loss_scale(state)` before each update."
        )
    flags = np.zeros(len(values), bool) if skipped is None else np.asarray(skipped)
    if flags.shape != values.shape or flags.dtype != bool:
        raise ValueError(
            f"`skipped` must be {len(values)} booleans, one for each scale, got "
            f"{describe(skipped)}. A step was skipped if `grads_finite` of the state "
            "after it is False."
        )
    ax = new_axes() if ax is None else ax
    steps = np.arange(len(values))
    (line,) = ax.step(steps, values, where="post", **{"color": BLUE, **style})
    if flags.any():
        names = ax.get_legend_handles_labels()[1]
        ax.plot(
            steps[flags],
            values[flags],
            linestyle="none",
            marker="x",
            color=RED,
            zorder=line.get_zorder() + 1,
            label=None if "skipped step" in names else "skipped step",
        )
    ax.set_yscale("log", base=2)
    ax.margins(y=0.15)
    ax.locator_params(axis="x", integer=True)  # steps are whole
    ax.set(xlabel="step", ylabel="loss scale")
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False)
    return ax
