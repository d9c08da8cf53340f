"""Plot where gradients lie in the range of a type."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .._diagnostics.gradient_report import (
    GradientReport,
    check_gradients,
    exact_totals,
    gradient_report,
)
from .._tree import dtype_of, is_inexact, wide_dtype
from .._validation import check_concrete, check_limits, check_scale
from ._common import BLUE, GREY, TRACED, new_axes
from ._fit import fit_title, legend_below, settle, shrink
from ._zones import ZONES, draw_zones

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_gradient_range(
    grads: Any,
    *,
    loss_scale: jax.typing.ArrayLike = 1.0,
    dtype: Any = jnp.float16,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plot where gradients lie in the range of a type, before and after scaling.

    Use it to see how much a type would lose of the gradients, and how a loss scale
    helps. The plot is a histogram of the log2 of their absolute values, with one bar
    per octave (factor of two).

    Behind the bars are four zones of the type: lost (rounded to zero), subnormal (held
    with fewer digits), normal (held in full) and overflow. Above each zone is the share
    of elements in it. Elements that are already zero, NaN or infinite are in no bar and
    no share; the title counts them.

    Args:
        grads: true (unscaled) gradients, any pytree of arrays, as for
            `gradient_report`. They are copied to the host, array by array.
        loss_scale: the loss scale, a number or an array of shape ``()``. With 1, only
            the unscaled gradients are drawn.
        dtype: the floating-point type whose zones are drawn, or its name.
        ax: the matplotlib ``Axes`` to draw on, by default those of a new figure. If
            their figure has no layout engine, its margins grow until the labels fit.

    Returns:
        The ``Axes``.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if ``grads`` is a single number, is traced, holds something other
            than arrays, or holds no floating-point array; if ``loss_scale`` is not one
            number above 0; or if ``dtype`` is not a floating-point type.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> grads = {"w": jnp.geomspace(1e-9, 1e-3, 1000)}
        >>> axes = ls.plots.plot_gradient_range(grads, loss_scale=2.0**15)
        >>> [text.get_text() for text in axes.get_legend().get_texts()]
        ['unscaled', 'scaled by 2^15']

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, figure 3
    """
    check_gradients("grads", grads)
    check_concrete("grads", grads, TRACED)
    check_concrete("loss_scale", loss_scale, TRACED)
    loss_scale = jax.device_get(loss_scale)
    limits, name = check_limits(dtype), jnp.dtype(dtype).name
    check_scale("loss_scale", loss_scale)
    shift = float(np.log2(np.asarray(loss_scale, np.float64)))
    totals = [
        exact_totals(gradient_report(grads, dtype=dtype, loss_scale=scale))
        for scale in ((1.0, loss_scale) if shift else (1.0,))
    ]
    held = [_zones(counts) for counts in totals]
    counts, lowest = _octaves(grads)
    octaves = lowest + np.arange(len(counts) + 1)

    ax = new_axes() if ax is None else ax
    from matplotlib.ticker import PercentFormatter

    shares = counts / max(counts.sum(), 1)
    ax.stairs(shares, octaves, fill=True, color=GREY, label="unscaled")
    if shift:
        label = f"scaled by {_power_of_two(shift)}"
        ax.stairs(shares, octaves + shift, color=BLUE, linewidth=1.8, label=label)

    finite = np.finfo(np.float64)
    edges = np.log2(np.clip(limits, finite.smallest_subnormal, finite.max))
    drawn = [*octaves, *(octaves + shift)] if counts.any() else []
    span = [min([edges[0], *drawn]), max([edges[2], *drawn])]
    margin = 0.14 * (span[1] - span[0])
    left = min(span[0] - 1, edges[0] - margin)
    right = max(span[1] + 1, edges[2] + margin)
    ax.set_xlim(left, right)
    peak = max(shares.max(initial=0.0), 0.01)
    ax.set_ylim(0, 1.5 * peak)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="log2 |gradient|", ylabel="share of elements")

    # The texts depend on the size of the axes, and the size on the texts.
    settle(ax)
    fit_title(ax, _titles(totals[0], name))
    if shift:
        legend_below(ax)
    else:
        settle(ax)
    sizes = ("medium", "small", "x-small")
    shrink([ax.yaxis.label], sizes, ax.bbox.height, along="height")
    texts = {}
    for zone in ZONES:
        before, *after = (_percent(shares_of[zone]) for shares_of in held)
        texts[zone] = [before, *(f"→ {share}" for share in after)]
    taken = draw_zones(ax, [left, *edges, right], texts)
    # Leave room for the names of the zones above the highest bar.
    top = peak / (1 - min(taken, 0.7))
    ax.set_ylim(0, top)
    ax.set_yticks([y for y in ax.get_yticks() if y <= min(top, 1)] if drawn else [])
    settle(ax)
    return ax


def _octaves(grads: Any) -> tuple[npt.NDArray[np.int64], int]:
    """Count the finite nonzero elements in each octave; return the first octave too."""
    lowest, highest = -1100, 1100  # of float64
    counts = np.zeros(highest - lowest, np.int64)
    for x in jax.tree.leaves(grads):
        if is_inexact(x):
            wide = np.asarray(jax.device_get(x)).astype(wide_dtype(dtype_of(x)))
            magnitude = np.abs(wide[np.isfinite(wide) & (wide != 0)])
            exponent = np.frexp(magnitude)[1] - 1 - lowest
            counts += np.bincount(exponent, minlength=len(counts))
    used = np.flatnonzero(counts)
    if not len(used):
        return np.zeros(0, np.int64), 0
    return counts[used[0] : used[-1] + 1], int(used[0]) + lowest


def _zones(totals: GradientReport) -> dict[str, float]:
    """Return the share of the finite nonzero elements in each zone."""
    elements = totals.size - totals.nan - totals.inf - totals.zero
    normal = elements - totals.underflow - totals.subnormal - totals.overflow
    counts = (totals.underflow, totals.subnormal, normal, totals.overflow)
    return {
        zone: count / max(elements, 1)
        for zone, count in zip(ZONES, counts, strict=True)
    }


def _titles(totals: GradientReport, name: str) -> list[str]:
    """Return the title in one line, and broken into several."""
    nonfinite = totals.nan + totals.inf
    size, where = f"{totals.size:,} gradients", f"in the range of {name}"
    parts = []
    if totals.zero:
        parts.append(f"{_percent(totals.zero / totals.size)} already zero")
    if nonfinite:
        parts.append(f"{nonfinite:,} NaN or inf")
    rest = ", ".join(parts)
    if not rest:
        return [f"{size} {where}", f"{size}\n{where}"]
    lines = [f"{size} {where}, {rest}", f"{size} {where},\n{rest}"]
    return [*lines, f"{size}\n{where},\n{rest}"]


def _percent(share: float) -> str:
    """Format a share so that a few do not look like none, nor nearly all like all."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share:.1%}" if 0 < share < 1 else f"{share:.0%}"


def _power_of_two(exponent: float) -> str:
    whole = exponent == round(exponent)
    return f"2^{exponent:.0f}" if whole else f"{2.0**exponent:,.6g}"
