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


def test_traced_values_are_refused():
    for name, plot in {
        "grads": lambda x: plot_range([x]),
        "loss_scale": lambda x: plot_range(GRADS, loss_scale=x),
        "scales": lambda x: plot_scale(x),
        "skipped": lambda x: plot_scale([8.0], x),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}` must hold concrete numbers"):
            jax.eval_shape(plot, np.ones(1))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: plot_range(GRADS), lambda: plot_scale([1.0])):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()
