"""format_report."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ls

GRADS = {
    "layers": [
        {"w": np.full((30, 30), 1e-9), "b": np.ones(30)},
        {"w": np.array([[1.0] * 4, [np.nan] * 4, [1.0] * 4]), "b": np.full(2, np.inf)},
    ],
    "o": np.array([1.0] + [1e-6] * 1999),
}
GRADS = jax.tree.map(jnp.float32, GRADS)


TABLE = """\
5 arrays, 2 with NaN or inf, 3 with overflow
                     size    NaN     inf  zero  underflow  subnormal  overflow  max |g|
['layers'][1]['b']      2      -  2 100%     -          -          -         -        0
['layers'][1]['w']     12  4 33%       -     -          -          -     8 67%        1
['layers'][0]['b']     30      -       -     -          -          -   30 100%        1
['o']               2,000      -       -     -          -          -     1 <1%        1
['layers'][0]['w']    900      -       -     -          -          -         -    1e-09
all                 2,944  4 <1%   2 <1%     -          -          -     39 1%        1"""  # noqa: E501


def paths(text):
    return re.findall(r"^(?:\[.*?\])+", text, re.M)


def test_the_whole_table():
    report = ls.gradient_report(GRADS, loss_scale=2.0**17)
    assert ls.format_report(report) == TABLE
    assert isinstance(ls.format_report(report), str)


def test_an_interactive_session_shows_the_lines():
    assert repr(ls.format_report(ls.gradient_report(GRADS))).count("\n") == 7


def test_fetched_and_compiled_reports_give_the_same():
    report = jax.jit(ls.gradient_report)(GRADS)
    expected = ls.format_report(ls.gradient_report(GRADS))
    assert ls.format_report(report) == expected
    assert ls.format_report(jax.device_get(report)) == expected


def test_worst_are_nonfinite_then_overflow_then_underflow_then_subnormal_then_zero():
    grads = {
        "a": jnp.ones(4),
        "b": jnp.zeros(4),
        "c": jnp.full(4, 1e-6),
        "d": jnp.full(4, 1e-9),
        "e": jnp.full(4, 1e6),
        "f": jnp.array([1, 1, 1, jnp.nan]),
        "g": jnp.array([jnp.inf, 1, 1, jnp.nan]),
        "h": jnp.full(4, 2.0),
    }
    table = ls.format_report(ls.gradient_report(grads))
    assert "".join(paths(table)) == "".join(f"['{x}']" for x in "gfedcbha")


def test_the_limit_leaves_out_the_best():
    report = ls.gradient_report(GRADS, loss_scale=2.0**17)
    lines = TABLE.split("\n")
    shown = ls.format_report(report, limit=2).split("\n")
    # Columns are as wide as what is shown.
    assert [line.split() for line in shown[:4]] == [x.split() for x in lines[:4]]
    assert shown[4] == "... and 3 more, none of them worse"
    assert shown[5].split() == lines[-1].split()
    assert ls.format_report(report, limit=5) == TABLE


def test_totals_beyond_int32_are_exact():
    counts = [jnp.int32(2**31 - 1)] * 3
    none = [jnp.int32(0)] * 3
    report = ls.GradientReport(
        counts, none, none, none, none, none, [jnp.float32(0)] * 3, counts
    )
    assert f"all  {3 * (2**31 - 1):,}  " in ls.format_report(report)


def test_one_array_and_none():
    report = ls.gradient_report(jnp.array([1.0, jnp.nan]))
    assert "\n(root)     2  1 50% " in ls.format_report(report)
    assert ls.format_report(report).startswith("1 array, 1 with NaN or inf\n")
    good = ls.format_report(ls.gradient_report([jnp.ones(2), jnp.ones(2)]))
    assert good.startswith("2 arrays, none with NaN, inf, overflow or underflow\n")
    for empty in ({}, None):
        text = ls.format_report(ls.gradient_report(empty))
        assert text == "The tree of gradients holds no arrays."


def test_few_and_all_but_few_are_not_none_and_all():
    one = np.float32(np.arange(1000) == 999)
    text = ls.format_report(ls.gradient_report((one, 1 - one)))
    assert "999 >99%" in text and "1 <1%" in text


@pytest.mark.parametrize("report", [None, {}, 3, {"w": jnp.ones(2)}])
def test_what_is_no_report_is_refused(report):
    with pytest.raises(ValueError, match="`report` must be a GradientReport, as"):
        ls.format_report(report)


def test_a_traced_report_and_that_of_an_ensemble_are_refused():
    with pytest.raises(ValueError, match="a traced value. Return it from the compiled"):
        jax.jit(lambda g: len(ls.format_report(ls.gradient_report(g))))(GRADS)
    members = {"w": jnp.ones((3, 2))}
    report = jax.jit(jax.vmap(ls.gradient_report))(members)
    with pytest.raises(ValueError, match="must hold one number in each leaf, got"):
        ls.format_report(report)
    member = jax.tree.map(lambda x: x[0], report)
    assert paths(ls.format_report(member)) == ["['w']"]


@pytest.mark.parametrize("limit", [0, -1, 1.5, None, True])
def test_a_limit_that_is_no_count_is_refused(limit):
    with pytest.raises(ValueError, match="`limit` must be a whole number from 1"):
        ls.format_report(ls.gradient_report(GRADS), limit)
