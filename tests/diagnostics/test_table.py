"""format_report."""

import re

import jax
import numpy as np
import pytest

import optax_lossscale as ls

FIRST = {"w": np.full((30, 30), 1e-9), "b": np.ones(30)}
SECOND = {"w": np.repeat([1.0, np.nan, 1.0], 4), "b": np.full(2, np.inf)}
GRADS = {"layers": [FIRST, SECOND], "o": np.array([1.0] + [1e-6] * 1999)}
GRADS = jax.tree.map(np.float32, GRADS)
TABLE = """\
5 arrays, 2 with NaN or inf, 3 with overflow
                     size    NaN     inf  zero  underflow  subnormal  overflow  max |g|
['layers'][1]['b']      2      -  2 100%     -          -          -         -        0
['layers'][1]['w']     12  4 33%       -     -          -          -     8 67%        1
['layers'][0]['b']     30      -       -     -          -          -   30 100%        1
['o']               2,000      -       -     -          -          -     1 <1%        1
['layers'][0]['w']    900      -       -     -          -          -         -    1e-09
all                 2,944  4 <1%   2 <1%     -          -          -     39 1%        1"""  # noqa: E501


def test_table_is_the_same_compiled_fetched_and_shown():
    report = ls.gradient_report(GRADS, loss_scale=2.0**17)
    compiled = jax.jit(lambda g: ls.gradient_report(g, loss_scale=2.0**17))(GRADS)
    for same in (report, compiled, jax.device_get(report)):
        # As an interactive session shows them.
        assert ls.format_report(same) == repr(ls.format_report(same)) == TABLE
        assert repr(same) == str(same) == TABLE


def test_limit_leaves_out_the_best():
    report = ls.gradient_report(GRADS, loss_scale=2.0**17)
    shown, lines = ls.format_report(report, limit=2).split("\n"), TABLE.split("\n")
    expected = [*lines[:4], "... and 3 more, none of them worse", lines[-1]]
    # Columns are as wide as what is shown.
    assert [line.split() for line in shown] == [line.split() for line in expected]
    assert ls.format_report(report, limit=5) == TABLE


def test_report_without_a_table_shows_its_fields():
    shown = []
    jax.jit(lambda g: shown.append(repr(ls.gradient_report(g))))([np.ones(2)])
    shown.append(repr(jax.eval_shape(ls.gradient_report, [np.ones(2)])))
    shown.append(repr(jax.vmap(lambda x: ls.gradient_report([x]))(np.ones((2, 3)))))
    assert all(x.startswith("GradientReport(nan=") for x in shown)


def test_table_begins_with_the_worst():
    whole = {"a": 1, "b": 0, "c": 1e-6, "d": 1e-9, "e": 1e6, "f": 2}
    grads = {name: np.full(4, x, np.float32) for name, x in whole.items()}
    grads["g"] = np.float32([1, 1, 1, np.nan])
    grads["h"] = np.float32([np.inf, 1, 1, np.nan])
    grads["i"] = np.float32([*[1e6] * 8, 1])  # a lesser share of more elements
    table = ls.format_report(ls.gradient_report(grads))
    assert re.findall(r"^\['(.)'\]", table, re.M) == list("hgeidcbfa")


# The numbers of NaN among 1000 elements, and their shares.
SHARES = {5: "<1%", 6: "1%", 494: "49%", 994: "99%", 995: ">99%", 1000: "100%"}
ROOT = "1 array, 1 with NaN or inf\n(.*\n)\\(root\\)  1,000  {:,} {} "
NAN_AND_1 = np.float32([np.nan, 1])
BEGINNINGS = [
    *((np.repeat(NAN_AND_1, [n, 1000 - n]), ROOT.format(n, SHARES[n])) for n in SHARES),
    ([np.ones(2)] * 2, "2 arrays, none with NaN, inf, overflow or underflow\n"),
    ([np.full(1, 1e-9)], "1 array, 1 with underflow\n"),
    ({}, "The tree of gradients holds no arrays.$"),
]


@pytest.mark.parametrize(("grads", "beginning"), BEGINNINGS)
def test_table_has_a_summary_and_exact_shares(grads, beginning):
    """Shares round to nothing and to all only if they are."""
    assert re.match(beginning, ls.format_report(ls.gradient_report(grads)))
