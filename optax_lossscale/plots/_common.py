"""Code that the plots share: colors and new axes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that color-blind readers can tell apart: those of Okabe and Ito, and two more.
GREY, BLUE, RED = "0.6", "#0072b2", "#d55e00"
ORANGE, GREEN, PINK, SKY = "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
BROWN, VIOLET = "#8c5a2b", "#9b4dff"

# The advice if something to be drawn is traced.
TRACED = "Return it from the compiled function and plot it outside."


def new_axes() -> "Axes":
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib. Install it: `pip install 'optax_lossscale[plots]'`."
        ) from error
    return pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
