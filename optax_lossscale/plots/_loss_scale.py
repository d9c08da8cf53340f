"""Plot the loss scale over the steps."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .._validation import check_concrete, describe
from ._common import (
    BLUE,
    BROWN,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    TRACED,
    VIOLET,
    new_axes,
)
from ._fit import legend_below, settle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SKIPPED = "skipped step"
# None stands for the color of the text, on a light or a dark background.
_COLORS = (BLUE, ORANGE, GREEN, PINK, None, BROWN, SKY, VIOLET)
# Dashes show a line under another line, and tell runs apart in grayscale.
_DASHES = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.2, 1)))


def plot_loss_scale(
    scales: npt.ArrayLike,
    skipped: npt.ArrayLike | None = None,
    ax: "Axes | None" = None,
    **style: Any,
) -> "Axes":
    """Plot the loss scale over the steps on a log2 axis, and mark skipped steps.

    The scale of step ``i`` is drawn from ``i`` to ``i + 1``. A skipped step is marked
    at ``i``. The legend is below the axes.

    To compare runs, call it again with the same ``ax`` and another ``label``. Up to
    eight runs get different colors and dashes, unless ``style`` contains a color.

    Args:
        scales: the scale that each step used, above 0, of shape ``(steps,)``.
        skipped: whether each step was skipped, as booleans or as 0 and 1, of the same
            shape.
        ax: the matplotlib ``Axes`` to draw on, by default those of a new figure. If
            their figure has no layout engine, its margins grow until the labels fit.
        style: passed on to ``Axes.step``, such as ``label`` or ``color``.

    Returns:
        The ``Axes``.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if ``scales`` is not one-dimensional, or holds something other than
            numbers above 0; if ``skipped`` does not have the same shape, or holds
            something other than booleans, 0 and 1; or if either is traced.

    Examples:
        >>> import optax_lossscale as ls
        >>> axes = ls.plots.plot_loss_scale([1024.0, 2048.0], [False, True])
        >>> axes.get_yscale()
        'log'
    """
    check_concrete("scales", scales, TRACED)
    check_concrete("skipped", skipped, TRACED)
    values = _scales(scales)
    flags = _flags(skipped, len(values))
    ax = new_axes() if ax is None else ax
    # Repeat the last value, so that its step is as wide as the others.
    levels = np.append(values, values[-1:])
    steps = np.arange(len(levels))
    (line,) = ax.step(steps, levels, where="post", **_styled(ax, style))
    if flags.any():
        names = ax.get_legend_handles_labels()[1]
        ax.plot(
            np.flatnonzero(flags),
            values[flags],
            linestyle="none",
            marker="x",
            color=RED,
            zorder=line.get_zorder() + 1,
            label=None if _SKIPPED in names else _SKIPPED,
        )
    ax.set_yscale("log", base=2)
    ax.margins(y=0.15)
    _whole_ticks(ax)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[1]:
        legend_below(ax, last=_SKIPPED)
    else:
        settle(ax)
    return ax


def _scales(scales: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(scales)
    if values.ndim == 1 and _is_real(values):
        numbers = values.astype(np.float64)
        if np.all((numbers > 0) & (numbers < np.inf)):
            return numbers
    raise ValueError(
        "`scales` must be numbers above 0, one for each step, got "
        f"{describe(scales)}. Collect `get_loss_scale(state)` before each update."
    )


def _flags(skipped: npt.ArrayLike | None, steps: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(steps, bool) if skipped is None else np.asarray(skipped)
    if flags.shape == (steps,):
        if flags.dtype == bool:
            return flags
        if _is_real(flags) and np.all((flags == 0) | (flags == 1)):
            return flags == 1
    raise ValueError(
        f"`skipped` must be {steps} booleans, one for each scale, or 0 and 1 instead, "
        f"got {describe(skipped)}. A step was skipped if `grads_finite` is False in "
        "the state after it."
    )


def _is_real(values: npt.NDArray[Any]) -> bool:
    """Return whether an array holds real numbers, of bfloat16 or similar types too."""
    kinds = jnp.floating, jnp.integer
    return any(jnp.issubdtype(values.dtype, kind) for kind in kinds)


def _styled(ax: "Axes", style: dict[str, Any]) -> dict[str, Any]:
    """Return the style with full names, and with color and dashes if it has no color.

    The color is the first of those that the fewest lines on the axes use.
    """
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    style = normalize_kwargs(style, Line2D)
    if style.get("color") is not None:
        return style
    foreground = ax.xaxis.label.get_color()
    colors = [foreground if color is None else color for color in _COLORS]
    lines = np.array([to_rgb(line.get_color()) for line in ax.lines]).reshape(-1, 1, 3)
    distances = np.linalg.norm(lines - [to_rgb(color) for color in colors], axis=-1)
    uses = np.sum(distances < 0.2, axis=0)  # similar colors count as the same
    choice = int(uses.argmin())
    dashes = _DASHES[(choice + uses[choice]) % len(_DASHES)]
    return {"linestyle": dashes, **style, "color": colors[choice]}


def _whole_ticks(ax: "Axes") -> None:
    """Put ticks at whole steps, unless the user has placed ticks."""
    from matplotlib.ticker import MaxNLocator

    locator = ax.xaxis.get_major_locator()
    if isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)
