"""Text stays inside the figure, and no legend lies on a curve."""

import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_range, plot_scale = ls.plots.plot_gradient_range, ls.plots.plot_loss_scale

# A column of a paper, a page, a slide.
COLUMN, PAGE, SLIDE = (3.3, 2.2), (7.5, 3.6), (12, 5)
FEW = [(COLUMN, "constrained"), (PAGE, None)]
MORE = [
    *((COLUMN, None), (COLUMN, "tight"), (PAGE, "constrained"), (PAGE, "tight")),
    *((SLIDE, None), (SLIDE, "constrained")),
]
MORE = [pytest.param(*figure, marks=pytest.mark.slow) for figure in MORE]
FIGURES = pytest.mark.parametrize(("size", "layout"), [*FEW, *MORE], ids=str)

STEPS = np.arange(60)
SHAPES = {
    "one step": np.array([2.0**15]),
    "rising": 2.0 ** (10 + STEPS // 5),
    "constant": np.full(60, 2.0**24),
}
# As many as in `test_zones`, so that one program counts them.
NORMAL = np.exp2(np.linspace(-38.0, -6.0, 330)).astype(np.float32)
FLAWED = np.concatenate([np.float32([0] * 7 + [np.nan]), NORMAL[8:]])


def is_inside(axes):
    """Whether all text lies in the figure, and the axes have most of its room."""
    axes.figure.canvas.figure.draw_without_rendering()
    box, inside = axes.get_tightbbox(), axes.figure.bbox
    assert axes.bbox.width > 0.5 * inside.width
    assert axes.bbox.height > 0.35 * inside.height
    low, high = np.array(inside.min) - 0.5, np.array(inside.max) + 0.5
    return bool(np.all(box.min >= low) and np.all(box.max <= high))


def legend_is_below(axes):
    """Whether the legend is under the axes and the name of the x axis."""
    box = axes.get_legend().get_window_extent()
    return box.y1 <= min(axes.bbox.y0, axes.xaxis.label.get_window_extent().y0)


@FIGURES
def test_a_loss_scale_fits_in_a_figure_of_any_size(size, layout):
    for name, scales in SHAPES.items():
        axes = plt.subplots(figsize=size, layout=layout)[1]
        plot_scale(scales, scales == scales[-1], axes, label=name)
        assert is_inside(axes) and legend_is_below(axes), name


@FIGURES
def test_eight_runs_fit_in_a_figure_of_any_size(size, layout):
    axes = plt.subplots(figsize=size, layout=layout)[1]
    for i in range(8):
        plot_scale(SHAPES["rising"], STEPS % 9 == i, axes, label=f"run number {i}")
    assert is_inside(axes) and legend_is_below(axes)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [*(f"run number {i}" for i in range(8)), "skipped step"]


@FIGURES
def test_a_range_fits_in_a_figure_of_any_size(size, layout):
    for grads, scale, dtype in (
        ([NORMAL], 1.0, "float16"),
        ([NORMAL * 2.0**40], 2.0**8, "float16"),
        ([FLAWED], 1000.0, "bfloat16"),
        ({}, 2.0**8, "float32"),
    ):
        axes = plt.subplots(figsize=size, layout=layout)[1]
        plot_range(grads, loss_scale=scale, dtype=dtype, ax=axes)
        assert is_inside(axes), dtype
        assert scale == 1 or legend_is_below(axes)


@FIGURES
def test_a_long_title_fits_in_a_figure_of_any_size(size, layout, monkeypatch):
    module = "optax_lossscale.plots._gradient_range.exact_totals"
    totals = ls.gradient_report([FLAWED]).totals
    long = totals._replace(size=123_456_789, zero=22_222_222, nan=1_234_567)
    monkeypatch.setattr(module, lambda report: long)
    axes = plt.subplots(figsize=size, layout=layout)[1]
    plot_range([FLAWED], loss_scale=8.0, dtype="float8_e5m2", ax=axes)
    assert is_inside(axes)
    assert axes.get_title().replace("\n", " ") == (
        "123,456,789 gradients in the range of float8_e5m2, "
        "18.0% already zero, 1,234,567 NaN or inf"
    )
    assert axes.title.get_fontsize() >= 7


def test_no_title_is_wider_than_its_share_of_a_row():
    _, both = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    for axes in both:
        plot_range([FLAWED], loss_scale=8.0, ax=axes)
    both[0].figure.draw_without_rendering()
    left, right = (axes.title.get_window_extent() for axes in both)
    assert left.x1 < right.x0


def test_a_figure_in_a_figure_fits():
    halves = plt.figure(figsize=(7.5, 3)).subfigures(1, 2)
    for half in halves:
        axes = plot_range([NORMAL], loss_scale=8.0, ax=half.subplots())
        assert legend_is_below(axes) and is_inside(axes)


def test_margins_that_are_wide_enough_stay():
    for draw in (
        lambda ax: plot_scale([8.0], [1], ax),
        lambda ax: plot_range({}, ax=ax),
    ):
        figure, axes = plt.subplots(figsize=PAGE)
        figure.subplots_adjust(left=0.2, bottom=0.3, right=0.7, top=0.8)
        draw(axes)
        margins = figure.subplotpars
        assert (margins.left, margins.bottom) == (0.2, 0.3)
        assert (margins.right, margins.top) == (0.7, 0.8)


def test_axes_that_were_placed_by_hand_stay_there():
    figure, axes = plt.subplots(figsize=COLUMN)
    axes.set_position([0.1, 0.1, 0.5, 0.5])
    plot_scale([8.0], [True], axes)
    assert axes.get_position().bounds == (0.1, 0.1, 0.5, 0.5)
    inset = figure.add_axes([0.7, 0.7, 0.2, 0.2])
    plot_scale([8.0], [True], inset)
    np.testing.assert_allclose(inset.get_position().bounds, (0.7, 0.7, 0.2, 0.2))


def test_a_figure_too_small_for_its_text_is_drawn_all_the_same():
    axes = plt.subplots(figsize=(0.6, 0.4))[1]
    plot_scale([8.0, 16.0], [True, False], axes, label="a long name of a run")
    plot_range([FLAWED], loss_scale=8.0, ax=plt.subplots(figsize=(0.6, 0.4))[1])
