"""plot_loss_scale."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

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
    assert all(float(step).is_integer() for step in axes.get_xticks())


def test_each_of_eight_runs_has_its_own_look_in_color_and_in_grayscale():
    axes = plt.subplots()[1]
    axes.axhline(65504.0, color="black")
    for run in range(9):
        assert plot_scale([8.0, 16.0], [True, False], axes, label=f"{run}") is axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [*"012345678", "skipped step"]
    lines = {line.get_label(): line for line in axes.lines}
    looks = [(lines[name].get_color(), lines[name].get_linestyle()) for name in names]
    assert looks[0] == looks[8] == (looks[0][0], "-")
    for (color, dashes), (other, others) in itertools.combinations(looks[:8], 2):
        difference = np.subtract(to_rgb(color), to_rgb(other))
        grey = abs(np.dot(difference, (0.2126, 0.7152, 0.0722)))
        assert np.linalg.norm(difference) > 0.25 and (dashes != others or grey > 0.1)
    for color, background in itertools.product(looks[:8], ("k", "w", looks[9][0])):
        difference = np.subtract(to_rgb(color[0]), to_rgb(background))
        assert np.linalg.norm(difference) > 0.25


def test_a_style_is_passed_on_by_any_of_its_names():
    axes = plot_scale([8.0])
    plot_scale([8.0], ax=axes, c="k", lw=3)
    plot_scale([8.0], ax=axes, ls="-", color=None)
    first, black, solid = axes.lines
    assert (black.get_color(), black.get_linewidth()) == ("k", 3)
    assert black.get_linestyle() == solid.get_linestyle() == "-"
    assert solid.get_color() not in (first.get_color(), "k")


def test_ticks_that_the_user_placed_stay():
    axes = plt.subplots()[1]
    axes.set_xticks([0.5, 1.5])
    plot_scale([8.0, 16.0], ax=axes)
    assert list(axes.get_xticks()) == [0.5, 1.5]


def test_a_constant_scale_and_none_at_all_can_be_drawn():
    axes = plot_scale([128.0] * 5, [0] * 5)
    low, high = axes.get_ylim()
    assert low < 128 < high and len(axes.lines) == 1 and axes.get_legend() is None
    assert 128 in [y for y in axes.get_yticks() if low < y < high]
    plot_scale([], []).figure.draw_without_rendering()


REFUSED_SCALES = [8.0, [[8.0]], [0.0, 1.0], [-1.0], [np.nan], [np.inf], "8", [8j]]
REFUSED_FLAGS = [True, [True], [2, 0], [-1, 0], [0.5, 0.0], [np.nan, 1.0], ["1", "0"]]


def test_scales_and_flags_that_make_no_sense_are_refused():
    for scales in (*REFUSED_SCALES, [None], [8.0, "x"]):
        with pytest.raises(ValueError, match="`scales` must be numbers above 0, one"):
            plot_scale(scales)
    for skipped in (*REFUSED_FLAGS, [[True, False]], [None, True], [True] * 3):
        with pytest.raises(ValueError, match="`skipped` must be 2 booleans, one for"):
            plot_scale([8.0, 8.0], skipped)
    assert plt.get_fignums() == []
