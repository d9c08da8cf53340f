"""Code that the plots share: colors, axes and the legend."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that color-blind readers can distinguish: Okabe's and Ito's.
GREY, BLUE, RED = "0.5", "#0072b2", "#d55e00"
ORANGE, GREEN, PINK = "#e69f00", "#009e73", "#cc79a7"

# The advice if something to be drawn is traced.
TRACED = "Return it from the compiled function and plot it outside."


def prepare(ax: "Axes | None") -> "Axes":
    """Return axes, new ones by default, whose figure has space for all labels."""
    if ax is not None:
        figure = ax.figure.canvas.figure  # even if the axes are in a subfigure
        if figure.get_layout_engine() is None and ax.get_subplotspec():
            figure.set_layout_engine("constrained")
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib. Install it: `pip install matplotlib`."
        ) from error
    return pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")[1]


def legend_beside(ax: "Axes") -> None:
    """Put a legend to the right of the axes, if anything has a label."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            fontsize="small",
            frameon=False,
        )
