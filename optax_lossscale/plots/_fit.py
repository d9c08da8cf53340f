"""Fit margins, legends, titles and labels into figures of any size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

_PAD = 3  # points between a text and anything that it must not touch


def settle(ax: "Axes") -> None:
    """Place the axes as they will be drawn, with their texts inside the figure.

    If the figure has a layout engine, the engine places them. Otherwise the margins are
    widened until no text sticks out, unless the axes are not where their subplot grid
    puts them.
    """
    figure = ax.figure
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure.canvas.figure)
    if engine is None or engine.adjust_compatible:
        _widen_margins(ax)
        _widen_margins(ax)  # narrower axes may have different ticks


def legend_below(ax: "Axes", last: str = "") -> None:
    """Put a legend below the x label, in as few rows as fit.

    There it cannot cover a curve or a title. The entry named ``last`` comes last.
    """
    from matplotlib.transforms import ScaledTranslation

    entries = zip(*ax.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(entries, key=lambda e: e[1] == last), strict=True)
    if old := ax.get_legend():
        old.remove()
    settle(ax)
    figure, axes = ax.figure, ax.bbox
    around, below = ax.get_tightbbox() or axes, ax.xaxis.get_tightbbox() or axes
    drop = max(axes.y0 - below.y0, 0.0) / figure.dpi
    anchor = ax.transAxes + ScaledTranslation(0, -drop, figure.dpi_scale_trans)

    def draw(rows: int, size: str, right: bool) -> "Bbox":
        legend = ax.legend(
            handles,
            labels,
            ncols=-(-len(labels) // rows),
            loc="upper right" if right else "upper center",
            bbox_to_anchor=(1.0 if right else 0.5, 0.0),
            bbox_transform=anchor,
            borderaxespad=0.2,
            borderpad=0.2,
            columnspacing=1.0,
            handlelength=2.2,
            handletextpad=0.5,
            labelspacing=0.3,
            fontsize=size,
            frameon=False,
        )
        return legend.get_window_extent()

    # The legend may also extend below the labels of the y axis, unless a layout engine
    # would make the axes narrower for that.
    room = axes.width
    if figure.get_layout_engine() is None:
        room = axes.x1 - max(around.x0, figure.bbox.x0)
    for size in ("small", "x-small", "xx-small"):
        for rows in range(1, len(labels) + 1):
            box = draw(rows, size, right=False)
            if box.width <= room:
                break
        if box.width > axes.width:
            box = draw(rows, size, right=True)
        if box.width <= room and box.height <= 0.35 * axes.height:
            break
    settle(ax)


def fit_title(ax: "Axes", wordings: Sequence[str]) -> None:
    """Set the title to the first wording that fits, in a size that fits."""
    title = ax.set_title(wordings[0])
    size = float(title.get_fontsize())
    factors = [(1.0, 0.83, 0.7), *[(0.83, 0.7, 0.6)] * (len(wordings) - 1)]
    trials = [(w, f) for w, fs in zip(wordings, factors, strict=True) for f in fs]
    trials.append((wordings[-1], 0.5))
    axes, inside, spec = ax.bbox, ax.figure.bbox, ax.get_subplotspec()
    if spec and spec.get_gridspec().ncols > 1:
        room = axes.width
    else:
        half = min(axes.x0 + axes.x1 - 2 * inside.x0, 2 * inside.x1 - axes.x0 - axes.x1)
        room = max(axes.width, half - 2 * _PAD * ax.figure.dpi / 72)
    for wording, factor in trials:
        title.set_text(wording)
        if shrink([title], [size * factor], room):
            return


def shrink(
    texts: "Sequence[Text]",
    sizes: Sequence[float | str],
    room: float,
    along: str = "width",
) -> bool:
    """Set the first size at which texts in a row fit; return whether there is one."""
    for size in sizes:
        for text in texts:
            text.set_fontsize(size)
        taken = sum(getattr(text.get_window_extent(), along) for text in texts)
        if taken + pixels(texts[0], _PAD) * (len(texts) - 1) <= room:
            return True
    return False


def spread(
    centers: Sequence[float],
    widths: Sequence[float],
    low: float,
    high: float,
    gap: float,
) -> list[float]:
    """Move ascending centers just far enough apart that none overlaps the next.

    They stay between ``low`` and ``high`` if there is room.
    """
    half = np.asarray(widths) / 2
    placed = list(centers)
    for i, center in enumerate(centers):
        least = low if i == 0 else placed[i - 1] + half[i - 1] + gap
        placed[i] = max(center, least + half[i])
    for i in reversed(range(len(placed))):
        most = high if i == len(placed) - 1 else placed[i + 1] - half[i + 1] - gap
        placed[i] = min(placed[i], most - half[i])
    return [float(x) for x in placed]


def pixels(artist: "Text", points: float) -> float:
    """Convert points to pixels of a figure."""
    figure = artist.figure
    assert figure is not None
    return points * figure.dpi / 72


def _widen_margins(ax: "Axes") -> None:
    figure, text = ax.figure, ax.get_tightbbox()
    subplots = [(a, a.get_subplotspec()) for a in figure.axes]
    if text is None or ax.get_subplotspec() is None:
        return
    for other, spec in subplots:
        place = other.get_position(original=True).bounds
        # The annotation omits subfigures.
        if spec and not np.allclose(place, spec.get_position(figure).bounds):  # type: ignore[arg-type]
            return  # placed by hand
    inside, pad = figure.bbox, _PAD * figure.dpi / 72
    margins = figure.subplotpars
    left = margins.left + max(inside.x0 + pad - text.x0, 0) / inside.width
    right = margins.right - max(text.x1 - inside.x1 + pad, 0) / inside.width
    bottom = margins.bottom + max(inside.y0 + pad - text.y0, 0) / inside.height
    top = margins.top - max(text.y1 - inside.y1 + pad, 0) / inside.height
    if right - left > 0.1 and top - bottom > 0.1:
        figure.subplots_adjust(left, bottom, right, top)
