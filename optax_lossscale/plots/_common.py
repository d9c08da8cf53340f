"""What the plots share: colours, new axes, a check of what is drawn."""

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that the colour-blind tell apart.
GREY, BLUE, RED = "0.6", "#0072b2", "#d55e00"


def new_axes() -> "Axes":
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib: `pip install 'optax_lossscale[plots]'` brings it."
        ) from error
    return pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")[1]


def check_concrete(name: str, tree: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise ValueError(
            f"`{name}` must hold numbers, got something that is being traced. Return "
            "it from the compiled function and plot it outside."
        )
