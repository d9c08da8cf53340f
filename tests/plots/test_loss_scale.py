"""plot_loss_scale."""

import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_scale = ls.plots.plot_loss_scale


def test_the_scale_is_drawn_by_steps_on_a_log2_axis():
    axes = plot_scale(jnp.array([8, 16, 8], "bfloat16"), jnp.array([0, 1, 1]))
    line, marks = axes.lines
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(line.get_xydata(), [[0, 8], [1, 16], [2, 8], [3, 8]])
    np.testing.assert_array_equal(marks.get_xydata(), [[1, 16], [2, 8]])
    assert marks.get_zorder() > line.get_zorder()
    assert (axes.get_yscale(), axes.get_xlabel()) == ("log", "step")
    assert axes.yaxis.get_transform().base == 2 and axes.get_ylabel() == "loss scale"


def test_runs_share_axes_and_one_entry_for_skipped_steps_and_take_a_style():
    axes = plt.subplots()[1]
    for color in ("red", "black"):
        assert plot_scale([8.0, 16.0], [True, False], ax=axes, color=color) is axes
    assert [line.get_color() for line in axes.lines[::2]] == ["red", "black"]
    assert [x.get_text() for x in axes.get_legend().get_texts()] == ["skipped step"]


def test_a_constant_scale_and_none_at_all_can_be_drawn():
    axes = plot_scale([128.0] * 5, [0] * 5)
    low, high = axes.get_ylim()
    assert low < 128 < high and len(axes.lines) == 1 and axes.get_legend() is None
    assert 128 in [y for y in axes.get_yticks() if low < y < high]
    plot_scale([], []).figure.draw_without_rendering()
    assert len(plot_scale([8.0, 16.0]).lines) == 1
