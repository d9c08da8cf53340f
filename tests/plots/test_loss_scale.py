"""plot_loss_scale."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_scale = ls.plots.plot_loss_scale


def test_the_scale_is_drawn_by_steps_on_a_log2_axis():
    axes = plot_scale(jnp.array([8.0, 16.0, 8.0]), jnp.array([False, True, False]))
    line, marks = axes.lines
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(line.get_xydata(), [[0, 8], [1, 16], [2, 8]])
    np.testing.assert_array_equal(marks.get_xydata(), [[1, 16]])
    assert (axes.get_yscale(), axes.get_xlabel()) == ("log", "step")
    assert axes.get_ylabel() == "loss scale"
    assert all(float(step).is_integer() for step in axes.get_xticks())
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["skipped step"]


def test_runs_are_compared_on_the_same_axes():
    _, given = plt.subplots()
    for name, color in (("one", "red"), ("two", "blue")):
        axes = plot_scale([8.0, 16.0], [True, False], given, label=name, color=color)
        assert axes is given
    assert [line.get_color() for line in axes.lines[::2]] == ["red", "blue"]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(texts) == ["one", "skipped step", "two"]


def test_a_constant_scale_and_none_at_all_can_be_drawn():
    axes = plot_scale([128.0] * 5)
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    assert low < 128 < high and axes.get_legend() is None
    assert 128 in [y for y in axes.get_yticks() if low < y < high]
    plot_scale([]).figure.canvas.draw()


@pytest.mark.parametrize(
    "scales", [8.0, [[8.0]], [0.0], [-1.0], [np.nan], [np.inf], "8", [None], [8.0, "x"]]
)
def test_what_are_no_scales_is_refused(scales):
    with pytest.raises(ValueError, match="`scales` must be numbers above 0, one for"):
        plot_scale(scales)


@pytest.mark.parametrize("skipped", [True, [True], [1, 0], [[True, False]], "no"])
def test_what_are_no_flags_is_refused(skipped):
    with pytest.raises(ValueError, match="`skipped` must be 2 booleans, one for each"):
        plot_scale([8.0, 8.0], skipped)
