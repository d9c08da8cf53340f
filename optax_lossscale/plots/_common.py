"""Code that the plots share: colors, axes and the legend."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that color-blind readers can tell apart: Okabe's and Ito's, and three more.
GREY, BLUE, RED = "0.5", "#0072b2", "#d55e00"
ORANGE, GREEN, PINK, SKY = "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
BROWN, VIOLET = "#7a4a1e", "#9b4dff"
RUNS = (BLUE, ORANGE, GREEN, PINK, SKY, GREY, BROWN, VIOLET)

# The advice if something to be drawn is traced.
TRACED = "Return it from the compiled function and plot it outside."


def prepare(ax: "Axes | None") -> "Axes":
    """Return axes, new ones by default, whose figure makes room for all labels."""
    if ax is not None:
        figure = ax.figure.canvas.figure  # also of axes in a subfigure
        if figure.get_layout_engine() is None and ax.get_subplotspec():
            figure.set_layout_engine("constrained")
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib. Install it: `pip install 'optax_lossscale[plots]'`."
        ) from error
    return pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")[1]


def is_small(ax: "Axes") -> bool:
    """Return whether text should be smaller, as in a column of a paper or a slide."""
    return bool(ax.bbox.width < 4 * ax.figure.dpi)


def legend_below(ax: "Axes", last: str = "") -> None:
    """Put a legend below the axes, in as few rows as fit; ``last`` comes last."""
    from matplotlib.transforms import Bbox, ScaledTranslation

    entries = list(zip(*ax.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: entry[1] == last)
    inner, inch = ax.bbox, ax.figure.dpi
    axes = [axis.get_tightbbox() for axis in (ax.xaxis, ax.yaxis)]
    outer = Bbox.union([inner, *filter(None, axes)])
    right = (outer.x0 + outer.x1 - inner.x0 - inner.x1) / 2
    move = ScaledTranslation(
        right / inch, (outer.y0 - inner.y0) / inch, ax.figure.dpi_scale_trans
    )
    for rows in range(1, len(entries) + 1):
        legend = ax.legend(
            *zip(*entries, strict=True),
            ncols=-(-len(entries) // rows),
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            bbox_transform=ax.transAxes + move,
            borderpad=0.0,
            columnspacing=1.0,
            labelspacing=0.3,
            fontsize="x-small" if is_small(ax) else "small",
            frameon=False,
        )
        if legend.get_window_extent().width <= outer.width:
            break
