"""Both plots: nothing is cut off, no legend lies on a curve, what both refuse."""

import sys

import jax
import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_range, plot_scale = ls.plots.plot_gradient_range, ls.plots.plot_loss_scale

GRADS = [np.float32([0, np.nan, *np.exp2(np.linspace(-38, -6, 330))])]


def test_nothing_is_cut_off_or_overlaps():
    figure = plt.figure(figsize=(13, 5))
    axes = figure.subfigures(1, 2)[1].subplots(2)
    plot_range(GRADS, loss_scale=1e3, dtype="bfloat16", ax=axes[0])
    plot_scale(2.0 ** (np.arange(60) // 5), np.arange(60) % 9 == 8, ax=axes[1])
    figure.draw_without_rendering()
    inside, boxes = axes[0].figure.bbox, [ax.get_tightbbox() for ax in axes]
    for ax, box in zip(axes, boxes, strict=True):
        assert np.all(box.min >= inside.min) and np.all(box.max <= inside.max)
        assert ax.get_legend().get_window_extent().x0 > ax.bbox.x1
    assert not boxes[0].overlaps(boxes[1])


BAD_SCALES = (8.0, [[8.0]], [0.0, 1.0], [np.nan], [np.inf])
BAD_FLAGS = (True, [True], [2, 0], [np.nan, 1.0], ["1", "0"], [True] * 3)
REFUSED = [
    (plot_range, "grads", "x", "must"),
    (plot_range, "loss_scale", np.float32(0), "must be a number from 2"),
    (plot_range, "dtype", "int8", "must be a floating-point type"),
    *((plot_scale, "scales", x, "must be numbers above 0") for x in BAD_SCALES),
    *((plot_scale, "skipped", x, "must be 2 booleans") for x in BAD_FLAGS),
]
TRACED = [(plot_range, "grads"), (plot_range, "loss_scale")]
TRACED += [(plot_scale, "scales"), (plot_scale, "skipped")]
GIVEN = {plot_range: {"grads": GRADS}, plot_scale: {"scales": [8.0, 8.0]}}


@pytest.mark.parametrize(("plot", "name", "value", "words"), REFUSED)
def test_plots_refuse_before_they_make_a_figure(plot, name, value, words):
    with pytest.raises(ValueError, match=f"`{name}` {words}"):
        plot(**GIVEN[plot] | {name: value})
    assert plt.get_fignums() == []


@pytest.mark.parametrize(("plot", "name"), TRACED)
def test_plots_refuse_traced_values(plot, name):
    with pytest.raises(ValueError, match=f"`{name}` must hold concrete numbers"):
        jax.eval_shape(lambda x: plot(**GIVEN[plot] | {name: x}), np.ones(1))


def test_plots_say_what_to_install_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: plot_range(GRADS), lambda: plot_scale([1.0])):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()
