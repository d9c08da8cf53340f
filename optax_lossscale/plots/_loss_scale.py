"""Plot the loss scale over the steps."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._validation import check_concrete, check_series
from . import _common

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SKIPPED = "skipped step"
# Dashes show a line under another line, and tell runs apart in grayscale.
_DASHES = ("-", "--", "-.", ":")


def plot_loss_scale(
    scales: npt.ArrayLike,
    skipped: npt.ArrayLike | None = None,
    ax: "Axes | None" = None,
    **style: Any,
) -> "Axes":
    """Plot the loss scale over the steps on a log2 axis, and mark skipped steps.

    The scale of step ``i`` is drawn from ``i`` to ``i + 1``, and a skipped step is
    marked at ``i``. To compare runs, call it again with the same ``ax`` and another
    ``label``. Up to eight runs get different colors and dashes, unless ``style``
    contains a color.

    Args:
        scales: the scale that each step used, above 0, of shape ``(steps,)``.
        skipped: whether each step was skipped, as booleans or 0 and 1, in this shape.
        ax: the matplotlib ``Axes`` to draw on, by default those of a new figure. If
            their figure has no layout engine, it gets the constrained one.
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
    values = check_series(
        "scales",
        scales,
        lambda x: (x > 0) & (x < np.inf),
        "numbers above 0, one for each step",
        "Collect `get_loss_scale(state)` before each update.",
    )
    steps = len(values)
    flags = check_series(
        "skipped",
        np.zeros(steps) if skipped is None else skipped,
        lambda x: (len(x) == steps) & ((x == 0) | (x == 1)),
        f"{steps} booleans, one for each scale, or 0 and 1 instead",
        "A step was skipped if `applied` is False in the state after it.",
    ).astype(bool)
    ax = _common.prepare(ax)
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    style = normalize_kwargs(style, Line2D)
    if style.get("color") is None:
        runs = sum(line.get_drawstyle() == "steps-post" for line in ax.lines)
        dashes = _DASHES[runs % len(_DASHES)]
        style = {
            "linestyle": dashes,
            **style,
            "color": _common.RUNS[runs % len(_common.RUNS)],
        }
    # Repeat the last value, so that its step is as wide as the others.
    levels = np.append(values, values[-1:])
    (line,) = ax.step(np.arange(len(levels)), levels, where="post", **style)
    if flags.any():
        first = _SKIPPED not in ax.get_legend_handles_labels()[1]
        ax.plot(
            np.flatnonzero(flags),
            values[flags],
            linestyle="none",
            marker="x",
            color=_common.RED,
            zorder=line.get_zorder() + 1,
            label=_SKIPPED if first else None,
        )
    ax.set_yscale("log", base=2)
    ax.margins(y=0.15)
    locator = ax.xaxis.get_major_locator()
    if isinstance(locator, MaxNLocator):  # else the user has placed the ticks
        locator.set_params(integer=True)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.grid(alpha=0.3)
    _common.legend_below(ax, last=_SKIPPED)
    return ax
