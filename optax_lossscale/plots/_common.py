"""What the plots share: colors and new axes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that the color-blind tell apart: of Okabe and Ito, and two more.
GREY, BLUE, RED = "0.6", "#0072b2", "#d55e00"
ORANGE, GREEN, PINK, SKY = "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
BROWN, VIOLET = "#8c5a2b", "#9b4dff"

# The way out where something to be drawn is being traced.
TRACED = "Return it from the compiled function and plot it outside."


def new_axes() -> "Axes":
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib: `pip install 'optax_lossscale[plots]'` brings it."
        ) from error
    return pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
