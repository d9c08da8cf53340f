"""A report on gradients, and its table."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._validation import check_concrete, check_count, describe
from .counting import add_up

# The kinds of elements, each a column. A narrow dtype has the last three.
ALL_KINDS = ("nan", "inf", "zero", "underflow", "subnormal", "overflow")
FINITE_KINDS = ALL_KINDS[:3]

# The path of an array, and its counts by the fields of the report.
_Row = dict[str, Any]


class GradientReport(NamedTuple):
    """The result of `gradient_report`: one number per leaf of the gradients.

    Each field is a tree with the structure of the gradients and float32 leaves of shape
    ``()``. Counts are exact up to 2**24. Below, ``dtype`` is the argument of
    `gradient_report`. An interactive session shows the table of `format_report`.

    Attributes:
        nan: the number of elements that are NaN.
        inf: infinite elements.
        zero: zeros.
        underflow: nonzero elements that round to zero in ``dtype`` after scaling.
        subnormal: elements that become subnormal in ``dtype``, and so lose digits.
        overflow: finite elements that become infinite or NaN in ``dtype``.
        max_abs: the largest finite absolute value before scaling; 0 if no element is
            finite.
        size: all elements; 0 for leaves that are not floating-point.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> report = ls.gradient_report({"w": jnp.array([1.0, jnp.nan])})
        >>> int(report.nan["w"]), int(report.totals.nan)
        (1, 1)
    """

    nan: Any
    inf: Any
    zero: Any
    underflow: Any
    subnormal: Any
    overflow: Any
    max_abs: Any
    size: Any

    def __repr__(self) -> str:
        try:
            return format_report(self)
        except Exception:  # it is traced or abstract, or belongs to an ensemble
            fields = (f"{name}={x!r}" for name, x in self._asdict().items())
            return f"GradientReport({', '.join(fields)})"

    @property
    def totals(self) -> "GradientReport":
        """The report of all leaves together: summed counts, the largest ``max_abs``."""
        rows = zip(*map(jax.tree.leaves, self), strict=True)
        counts = [GradientReport(*map(jnp.float32, x))._asdict() for x in rows]
        sums = add_up(counts)
        return GradientReport(*(sums[name] for name in self._fields))


class Table(str):
    """Text whose ``repr`` is the text, because notebooks show the repr of a result."""

    def __repr__(self) -> str:
        return str(self)


def format_report(report: GradientReport, *, limit: int = 20) -> str:
    """Format a `gradient_report` as a table, one row per array, the worst one first.

    Arrays are sorted by their share of NaN and inf, then of overflow, underflow,
    subnormal values and zeros. Each count is followed by its share of the elements;
    ``-`` means 0. `format_report` waits for the device.

    Args:
        report: the result of `gradient_report`.
        limit: the largest number of arrays to show, 1 or more.

    Returns:
        A string of several lines, which an interactive session shows without ``print``.

    Raises:
        ValueError: if ``report`` or ``limit`` is not as described.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> print(ls.format_report(ls.gradient_report([jnp.array([2.0, jnp.inf])])))
        1 array, 1 with NaN or inf
             size  NaN    inf  zero  underflow  subnormal  overflow  max |g|
        [0]     2    -  1 50%     -          -          -         -        2
        all     2    -  1 50%     -          -          -         -        2
    """
    limit = check_count("limit", limit, "It is the largest number of arrays to show.")
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
    return table_of(report, limit, ALL_KINDS)


def table_of(report: GradientReport, limit: int, kinds: tuple[str, ...]) -> Table:
    """Return the table of a report, with the columns of some kinds of elements."""
    rows = _rows(jax.device_get(report))
    rows.sort(key=lambda row: _badness(row, kinds), reverse=True)
    if not rows:
        return Table("The tree of gradients holds no arrays.")
    total = {"path": "all", **jax.device_get(report.totals)._asdict()}
    table = [
        ["", "size", "NaN", *kinds[1:], "max |g|"],
        *(_cells(row, kinds) for row in [*rows[:limit], total]),
    ]
    first, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([path.ljust(first), *map(str.rjust, cells, widths)])
        for path, *cells in table
    ]
    if len(rows) > limit:
        lines.insert(-1, f"... and {len(rows) - limit} more, none of them worse")
    return Table("\n".join([_summary(rows, kinds), *lines]))


def percent(share: float, digits: int = 0) -> str:
    """Format a share, with ``<`` or ``>`` if it would round to 0% or 100%."""
    least = 10.0 ** -(digits + 2)
    if 0 < share <= least / 2:
        return f"<{least:.{digits}%}"
    if 1 - least / 2 <= share < 1:
        return f">{1 - least:.{digits}%}"
    return f"{share:.{digits if 0 < share < 1 else 0}%}"


def _rows(report: GradientReport) -> list[_Row]:
    pairs = jax.tree_util.tree_leaves_with_path(report.size)
    paths = [jax.tree_util.keystr(path) or "(root)" for path, _ in pairs]
    columns = [paths, *(map(float, jax.tree.leaves(field)) for field in report)]
    names = ("path", *report._fields)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _badness(row: _Row, kinds: tuple[str, ...]) -> tuple[float, ...]:
    order = [x for x in ("overflow", "underflow", "subnormal", "zero") if x in kinds]
    counts = (row["nan"] + row["inf"], *(row[name] for name in order))
    return (*(count / max(row["size"], 1) for count in counts), row["max_abs"])


def _cells(row: _Row, kinds: tuple[str, ...]) -> list[str]:
    size, counts = row["size"], [row[name] for name in kinds]
    cells = [f"{x:,.0f} {percent(x / size)}" if x else "-" for x in counts]
    return [row["path"], f"{size:,.0f}", *cells, f"{row['max_abs']:.3g}"]


def _summary(rows: list[_Row], kinds: tuple[str, ...]) -> str:
    found = [f"{len(rows):,} array{'s' if len(rows) > 1 else ''}"]
    names = ["nan or inf", *(x for x in ("overflow", "underflow") if x in kinds)]
    for name in names:
        if number := sum(any(row[kind] for kind in name.split(" or ")) for row in rows):
            found.append(f"{number:,} with {name.replace('nan', 'NaN')}")
    if len(found) == 1:
        narrow = ", inf, overflow or underflow" if len(names) > 1 else " or inf"
        found.append(f"none with NaN{narrow}")
    return ", ".join(found)
