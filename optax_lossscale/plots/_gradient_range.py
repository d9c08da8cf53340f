"""Plot where gradients lie in the range of a dtype."""

import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .._diagnostics.gradient_report import gradient_report
from .._diagnostics.table import GradientReport, percent
from .._dtypes import dtype_of, is_inexact, limits_of, wide_dtype
from .._validation import check_concrete
from . import _common

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From left to right. The hatches distinguish the zones in grayscale.
_ZONES = (
    ("lost", _common.RED, "////"),
    ("subnormal", _common.ORANGE, "...."),
    ("normal", _common.GREEN, ""),
    ("overflow", _common.PINK, "xxxx"),
)


def plot_gradient_range(
    grads: Any,
    *,
    loss_scale: "jax.typing.ArrayLike" = 1.0,
    dtype: Any = jnp.float16,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plot where gradients lie in the range of a dtype, before and after scaling.

    The plot is a histogram of the log2 of their absolute values, with one bar per power
    of two. Behind the bars are four zones of the dtype: lost (rounded to zero),
    subnormal (held with fewer digits), normal (held in full) and overflow. The legend
    lists the share of elements in each zone. The title counts zeros, NaN and inf.

    Args:
        grads: unscaled gradients, any pytree of arrays.
        loss_scale: one number. With 1, only the unscaled gradients are drawn.
        dtype: the floating-point dtype whose zones are drawn, or its name.
        ax: the matplotlib ``Axes`` to draw on. The default is a new figure.

    Returns:
        The ``Axes``.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: as `gradient_report`, or if ``grads`` or ``loss_scale`` is traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> grads = {"w": jnp.geomspace(1e-9, 1e-3, 1000)}
        >>> axes = ls.plots.plot_gradient_range(grads, loss_scale=2.0**15)
        >>> [text.get_text() for text in axes.get_legend().get_texts()][:3]
        ['unscaled', 'scaled by 2^15', 'lost 24.6% → 0%']
    """
    check_concrete("grads", grads, _common.TRACED)
    check_concrete("loss_scale", loss_scale, _common.TRACED)
    loss_scale = jax.device_get(loss_scale)
    scaled = gradient_report(grads, dtype=dtype, loss_scale=loss_scale).totals
    unscaled = gradient_report(grads, dtype=dtype).totals
    scaled, unscaled = jax.device_get((scaled, unscaled))
    shift = float(np.log2(np.asarray(loss_scale, np.float64)))
    name = jnp.dtype(dtype).name
    shares, bins = _histogram(grads)
    shifted = bins + shift

    ax = _common.prepare(ax)
    from matplotlib.ticker import PercentFormatter

    label = "unscaled" if shift else None
    ax.stairs(shares, bins, fill=True, color=_common.GREY, label=label)
    if shift:
        label = f"scaled by {_power_of_two(shift)}"
        ax.stairs(shares, shifted, color=_common.BLUE, linewidth=1.8, label=label)
    float64 = np.finfo(np.float64)
    edges = np.log2(np.clip(limits_of(name), float64.smallest_subnormal, float64.max))
    span = [*edges, *bins, *shifted]
    margin = 0.1 * np.ptp(span)
    bounds = itertools.pairwise([min(span) - margin, *edges, max(span) + margin])
    totals = (unscaled, scaled) if shift else (unscaled,)
    held = zip(*map(_zone_shares, totals), strict=True)
    for (zone, color, hatch), ends, before_after in zip(
        _ZONES, bounds, held, strict=True
    ):
        ax.axvspan(
            *ends,
            facecolor=(color, 0.16),
            edgecolor=(color, 0.45),
            hatch=hatch,
            linewidth=0,
            zorder=0,
            label=f"{zone} {' → '.join(percent(x, 1) for x in before_after)}",
        )
    ax.set_xlim(min(span) - margin, max(span) + margin)
    ax.set_ylim(0, 1.05 * max(shares, default=1.0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="log2 |gradient|", ylabel="share of elements")
    ax.set_title(_title(unscaled, name), fontsize="medium", wrap=True)
    _common.legend_beside(ax)
    return ax


def _histogram(grads: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the share of the finite nonzero elements in each bin, and its edges."""
    lowest, highest = -1100, 1100  # of float64
    counts = np.zeros(highest - lowest, np.int64)
    for x in jax.tree.leaves(grads):
        if is_inexact(x):
            wide = np.asarray(jax.device_get(x)).astype(wide_dtype(dtype_of(x)))
            magnitude = np.abs(wide[np.isfinite(wide) & (wide != 0)])
            exponent = np.frexp(magnitude)[1] - 1 - lowest
            counts += np.bincount(exponent, minlength=len(counts))
    used = np.flatnonzero(counts)
    first, stop = (used[0], used[-1] + 1) if len(used) else (-lowest, -lowest)
    shares = counts[first:stop] / max(counts.sum(), 1)
    return shares, np.arange(first, stop + 1) + lowest


def _zone_shares(totals: GradientReport) -> list[float]:
    """Return the share of the finite nonzero elements in each zone."""
    elements = totals.size - totals.nan - totals.inf - totals.zero
    normal = elements - totals.underflow - totals.subnormal - totals.overflow
    counts = totals.underflow, totals.subnormal, normal, totals.overflow
    return [count / max(elements, 1) for count in counts]


def _title(totals: GradientReport, name: str) -> str:
    title = f"{totals.size:,.0f} gradients in the range of {name}"
    rest = []
    if totals.zero:
        rest.append(f"{percent(totals.zero / totals.size, 1)} already zero")
    if nonfinite := totals.nan + totals.inf:
        rest.append(f"{nonfinite:,.0f} NaN or inf")
    return f"{title}\n{', '.join(rest)}" if rest else title


def _power_of_two(exponent: float) -> str:
    whole = exponent == round(exponent)
    return f"2^{exponent:.0f}" if whole else f"{2.0**exponent:,.6g}"
