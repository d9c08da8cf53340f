"""Both plots: nothing is cut off, no legend lies on a curve, what both refuse."""

import itertools
import sys

import jax
import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_range, plot_scale = ls.plots.plot_gradient_range, ls.plots.plot_loss_scale

GRADS = [np.float32([0, np.nan, *np.exp2(np.linspace(-38, -6, 330))])]


def plot_runs(ax, runs):
    steps = np.arange(60)
    for i in range(runs):
        plot_scale(2.0 ** (steps // (i + 5)), steps % 9 == i, ax, label=f"training {i}")


DRAWN = {
    "unscaled": lambda ax: plot_range(GRADS, ax=ax),
    "scaled": lambda ax: plot_range(GRADS, loss_scale=1e3, dtype="bfloat16", ax=ax),
    "one run": lambda ax: plot_runs(ax, 1),
    "eight runs": lambda ax: plot_runs(ax, 8),
}
FIGURES = {
    "column": lambda: plt.subplots(figsize=(3.3, 2.2))[1],
    "grid": lambda: plt.subplots(2, 2, figsize=(6.5, 5.0))[1],
    "half": lambda: plt.figure(figsize=(6.5, 3.0)).subfigures(1, 2)[1].subplots(),
}


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("figure", FIGURES)
def test_nothing_is_cut_off_or_overlaps(figure, drawn):
    axes = list(np.ravel(FIGURES[figure]()))
    for ax in axes:
        DRAWN[drawn](ax)
    inside = axes[0].figure.bbox
    axes[0].figure.canvas.figure.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in axes]
    for ax, box in zip(axes, boxes, strict=True):
        assert np.all(box.min >= inside.min) and np.all(box.max <= inside.max)
        assert ax.bbox.height > 0.3 * inside.height / len(axes)
        labels = ax.xaxis.get_tightbbox()
        assert ax.get_legend().get_window_extent().y1 <= labels.y0 < ax.bbox.y0
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_layout_engine_and_axes_placed_by_hand_stay():
    figure, axes = plt.subplots(layout="tight")
    engine = figure.get_layout_engine()
    plot_scale([8.0], [True], axes)
    assert figure.get_layout_engine() is engine
    axes = plt.figure().add_axes([0.3, 0.4, 0.5, 0.5])
    plot_scale([8.0], [True], axes)
    axes.figure.draw_without_rendering()
    np.testing.assert_allclose(axes.get_position().bounds, [0.3, 0.4, 0.5, 0.5])


TRACED = {
    "grads": lambda x: plot_range([x]),
    "loss_scale": lambda x: plot_range(GRADS, loss_scale=x),
    "scales": lambda x: plot_scale(x),
    "skipped": lambda x: plot_scale([8.0], x),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_values_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must hold concrete numbers, got a"):
        jax.eval_shape(TRACED[name], np.ones(1))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: plot_range(GRADS), lambda: plot_scale([1.0])):
        with pytest.raises(ImportError, match=r"install 'optax_lossscale\[plots\]'"):
            draw()
