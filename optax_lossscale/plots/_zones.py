"""Draw the zones of a type, tinted, with their names in a row at the top."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ._common import GREEN, ORANGE, PINK, RED
from ._fit import pixels, shrink, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Transform

# In grayscale the names tell the zones apart.
ZONES = {"lost": RED, "subnormal": ORANGE, "normal": GREEN, "overflow": PINK}

_SIZES = ("small", "x-small", "xx-small")
_MARGIN, _LEADER = 4, 8  # points above and below the names, and of a line to a zone
_LOW = 130  # points: in axes lower than this, the names are smaller


def draw_zones(
    ax: "Axes", bounds: Sequence[float], texts: Mapping[str, Sequence[str]]
) -> float:
    """Tint each zone and write its lines of text at its top.

    The axes must already have their limits and their final width.

    Returns:
        The share of the height that the texts take up.
    """
    for zone, low, high in zip(ZONES, bounds, bounds[1:], strict=False):
        ax.axvspan(low, high, color=ZONES[zone], alpha=0.16, linewidth=0, zorder=0)
    for edge in bounds[1:-1]:
        ax.axvline(edge, color="0.4", linewidth=0.6, linestyle=":")
    middles = [(low + high) / 2 for low, high in zip(bounds, bounds[1:], strict=False)]
    names = [
        ax.annotate(
            "\n".join([zone, *texts[zone]]),
            xy=(middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -_MARGIN),
            textcoords="offset points",
            ha="center",
            va="top",
        )
        for zone, middle in zip(ZONES, middles, strict=True)
    ]
    sizes = _SIZES if ax.bbox.height > pixels(names[0], _LOW) else _SIZES[1:]
    shrink(names, sizes, ax.bbox.width)
    height = max(name.get_window_extent().height for name in names)
    led = _spread_names(ax, names, middles, height)
    taken = height + pixels(names[0], 2 * _MARGIN + (_LEADER if led else 0))
    return float(taken / ax.bbox.height)


def _spread_names(
    ax: "Axes",
    names: "Sequence[Annotation]",
    middles: Sequence[float],
    height: float,
) -> bool:
    """Move names sideways until none overlaps the next or leaves the axes.

    From each name that is now beside its zone, draw a line to the zone. Return whether
    there is one.
    """
    from matplotlib.patches import ConnectionPatch

    def across(x: float) -> float:
        return float(ax.transData.transform((x, 0))[0])

    point = pixels(names[0], 1)
    placed = spread(
        [across(middle) for middle in middles],
        [name.get_window_extent().width for name in names],
        ax.bbox.x0 + 2 * point,
        ax.bbox.x1 - 2 * point,
        3 * point,
    )
    led = False
    for name, middle, x in zip(names, middles, placed, strict=True):
        aside = (x - across(middle)) / point
        name.xyann = (aside, -_MARGIN)
        if abs(x - across(middle)) > name.get_window_extent().width / 2:
            led = True
            foot = -_MARGIN - height / point
            leader = ConnectionPatch(
                xyA=(middle, 1),
                xyB=(middle, 1),
                coordsA=_moved(ax, aside, foot),
                coordsB=_moved(ax, 0, foot - _LEADER),
                color=name.get_color(),
                linewidth=0.6,
            )
            leader.set_in_layout(False)
            ax.add_artist(leader)
    return led


def _moved(ax: "Axes", right: float, up: float) -> "Transform":
    """Return a transform with x in data and y in axes coordinates, moved by points."""
    from matplotlib.transforms import ScaledTranslation

    by = ScaledTranslation(right / 72, up / 72, ax.figure.dpi_scale_trans)
    return ax.get_xaxis_transform() + by
