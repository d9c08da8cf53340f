"""Format a report on gradients as a table."""

from typing import NamedTuple

import jax
import numpy as np

from .._validation import check_concrete, check_count, describe
from .report import GradientReport, exact_totals

_HEADINGS = {
    "nan": "NaN",
    "inf": "inf",
    "zero": "zero",
    "underflow": "underflow",
    "subnormal": "subnormal",
    "overflow": "overflow",
}


class Table(str):
    """Text whose ``repr`` is the text, because notebooks show the repr of a result."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Row(NamedTuple):
    """The counts of one array as Python numbers, which do not overflow."""

    path: str
    counts: dict[str, int]
    max_abs: float
    size: int

    def badness(self) -> tuple[float, ...]:
        size = max(self.size, 1)
        order = ("overflow", "underflow", "subnormal", "zero")
        nonfinite = self.counts["nan"] + self.counts["inf"]
        shares = (self.counts[name] / size for name in order)
        return (nonfinite / size, *shares, self.max_abs)

    def cells(self) -> list[str]:
        counts = [_cell(number, self.size) for number in self.counts.values()]
        return [self.path, f"{self.size:,}", *counts, f"{self.max_abs:.3g}"]


def format_report(report: GradientReport, limit: int = 20) -> str:
    """Format a report as a table with one row per array, the worst array first.

    Arrays are sorted by their share of NaN and inf, then of overflow, underflow,
    subnormal numbers and zeros. Each count is followed by its share of the array's
    elements; ``-`` means none.

    It copies the report to the host, so it waits for the device.

    Args:
        report: what `gradient_report` returned.
        limit: the largest number of arrays to show, 1 or more.

    Returns:
        A string of several lines. An interactive session shows it as a table, without
        ``print``. Paths are written as by ``jax.tree_util.keystr``.

    Raises:
        ValueError: if ``report`` is not a `GradientReport`, is traced, or has more than
            one number in a leaf; or if ``limit`` is not a whole number from 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> grads = {"b": jnp.array([1e-9, 1.0]), "w": jnp.array([2.0, jnp.inf])}
        >>> print(ls.format_report(ls.gradient_report(grads)))
        2 arrays, 1 with NaN or inf, 1 with underflow
               size  NaN    inf  zero  underflow  subnormal  overflow  max |g|
        ['w']     2    -  1 50%     -          -          -         -        2
        ['b']     2    -      -     -      1 50%          -         -        1
        all       4    -  1 25%     -      1 25%          -         -        2
    """
    limit = check_count("limit", limit, "It is the largest number of arrays to show.")
    check_report(report)
    report = jax.device_get(report)
    rows = sorted(_rows(report), key=_Row.badness, reverse=True)
    if not rows:
        return Table("The tree of gradients holds no arrays.")
    totals = exact_totals(report)
    counts = {name: getattr(totals, name) for name in _HEADINGS}
    total = _Row("all", counts, totals.max_abs, totals.size)
    table = [
        ["", "size", *_HEADINGS.values(), "max |g|"],
        *(row.cells() for row in [*rows[:limit], total]),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [cells[0].ljust(widths[0])]
            + [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        )
        for cells in table
    ]
    if len(rows) > limit:
        hidden = len(rows) - limit
        lines.insert(-1, f"... and {hidden} more, none of them worse")
    return Table("\n".join([_summary(rows), *lines]))


def check_report(report: GradientReport) -> None:
    """Raise if this is not a report on one tree of gradients, without fetching it."""
    if not isinstance(report, GradientReport):
        raise ValueError(
            "`report` must be a GradientReport, as `gradient_report(grads)` returns "
            f"it, got {describe(report)}."
        )
    check_concrete(
        "report",
        report,
        "Return it from the compiled function, or format it in a `jax.debug.callback`.",
    )
    if any(np.shape(x) != () for x in jax.tree.leaves(report)):
        raise ValueError(
            "`report` must hold one number in each leaf, got arrays. For an ensemble, "
            "format one member at a time: `jax.tree.map(lambda x: x[0], report)`."
        )


def _rows(report: GradientReport) -> list[_Row]:
    columns = {name: jax.tree.leaves(getattr(report, name)) for name in report._fields}
    paths = [
        jax.tree_util.keystr(path) or "(root)"
        for path, _ in jax.tree_util.tree_leaves_with_path(report.size)
    ]
    return [
        _Row(
            path,
            {name: int(columns[name][i]) for name in _HEADINGS},
            float(columns["max_abs"][i]),
            int(columns["size"][i]),
        )
        for i, path in enumerate(paths)
    ]


def _cell(number: int, size: int) -> str:
    if number == 0:
        return "-"
    share = number / size
    percent = (
        "<1%" if share < 0.005 else ">99%" if 0.995 <= share < 1 else f"{share:.0%}"
    )
    return f"{number:,} {percent}"


def _summary(rows: list[_Row]) -> str:
    kinds = {
        "NaN or inf": ("nan", "inf"),
        "overflow": ("overflow",),
        "underflow": ("underflow",),
    }
    having = {
        kind: sum(any(row.counts[name] for name in names) for row in rows)
        for kind, names in kinds.items()
    }
    found = [f"{number} with {kind}" for kind, number in having.items() if number]
    return ", ".join(
        [
            f"{len(rows):,} array{'s' if len(rows) > 1 else ''}",
            *(found or ["none with NaN, inf, overflow or underflow"]),
        ]
    )
