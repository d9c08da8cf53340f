"""Plot the loss scale over the steps."""

from typing import TYPE_CHECKING, Any

import numpy as np

from .._validation import check_concrete, describe
from . import _common

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes

_SKIPPED = "skipped step"


def plot_loss_scale(
    scales: "npt.ArrayLike",
    skipped: "npt.ArrayLike | None" = None,
    *,
    ax: "Axes | None" = None,
    **style: Any,
) -> "Axes":
    """Plot the loss scale over the steps on a log2 axis, and mark skipped steps.

    The scale of step ``i`` is drawn from ``i`` to ``i + 1``, and a skipped step is
    marked at ``i``, at the scale that overflowed. So record the scale before `update`,
    which changes it. To compare runs, call it again with the same ``ax`` and another
    ``label``.

    Args:
        scales: the scale that multiplied the loss of each step, above 0, of shape
            ``(steps,)``: `get_loss_scale` of the state before the update.
        skipped: whether each step was skipped, booleans or 0 and 1, in the same shape:
            ``~was_applied(state)`` of the state after the update.
        ax: the matplotlib ``Axes`` to draw on. The default is a new figure.
        style: passed on to ``Axes.step``, such as ``label`` or ``color``.

    Returns:
        The ``Axes``.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if ``scales`` or ``skipped`` is anything else, or is traced.

    Examples:
        >>> import optax_lossscale as ls
        >>> axes = ls.plots.plot_loss_scale([1024.0, 2048.0], [False, True])
        >>> axes.get_yscale()
        'log'
    """
    check_concrete("scales", scales, _common.TRACED)
    check_concrete("skipped", skipped, _common.TRACED)
    values = _as_array(scales, np.float64)
    if values.ndim != 1 or not np.all((values > 0) & (values < np.inf)):
        raise ValueError(
            "`scales` must be numbers above 0, one for each step, got "
            f"{describe(scales)}. Collect `get_loss_scale(state)` before each update."
        )
    flags = np.zeros(len(values)) if skipped is None else _as_array(skipped)
    if flags.shape != values.shape or not np.all((flags == 0) | (flags == 1)):
        raise ValueError(
            f"`skipped` must be {len(values)} booleans, one for each scale, got "
            f"{describe(skipped)}. Collect `~was_applied(state)` after each update."
        )
    ax = _common.prepare(ax)
    # Repeat the last value, so that its step is as wide as the others.
    levels = np.append(values, values[-1:])
    (line,) = ax.step(np.arange(len(levels)), levels, where="post", **style)
    if flags.any():
        first = _SKIPPED not in ax.get_legend_handles_labels()[1]
        ax.plot(
            np.flatnonzero(flags),
            values[flags != 0],
            linestyle="none",
            marker="x",
            color=_common.RED,
            zorder=line.get_zorder() + 1,
            label=_SKIPPED if first else None,
        )
    ax.set_yscale("log", base=2)
    ax.margins(y=0.15)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.grid(alpha=0.3)
    _common.legend_beside(ax)
    return ax


def _as_array(x: "npt.ArrayLike", dtype: Any = None) -> "npt.NDArray[Any]":
    try:
        return np.asarray(x, dtype)
    except (TypeError, ValueError):  # no numbers, such as optimizer states
        return np.array(np.nan)
