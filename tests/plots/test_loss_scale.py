"""plot_loss_scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

import optax_lossscale as ls

plot_scale = ls.plots.plot_loss_scale


def test_the_scale_is_drawn_by_steps_on_a_log2_axis():
    axes = plot_scale(jnp.array([8.0, 16.0, 8.0]), jnp.array([False, True, False]))
    line, marks = axes.lines
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(line.get_xydata(), [[0, 8], [1, 16], [2, 8], [3, 8]])
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


def test_the_last_step_is_as_wide_as_the_others():
    axes = plot_scale([8.0])
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), [0, 1])
    axes.figure.draw_without_rendering()
    assert axes.lines[0].get_window_extent().width > 0.8 * axes.bbox.width
    assert [tick for tick in axes.get_xticks() if 0 <= tick <= 1] == [0, 1]
    assert plot_scale(np.ones(100)).get_xlim()[1] > 100


def drawn(axes):
    """The lines of runs, without the marks of skipped steps."""
    return [line for line in axes.lines if line.get_linestyle() != "None"]


def test_each_run_takes_another_color_and_other_dashes():
    axes = plt.subplots()[1]
    for i in range(10):
        plot_scale([8.0, 16.0], [True, False], axes, label=i)
    runs = drawn(axes)
    colors = [to_rgb(run.get_color()) for run in runs]
    assert len(set(colors[:8])) == 8 and colors[8:] == colors[:2]
    skipped = to_rgb(axes.lines[1].get_color())
    for i, color in enumerate(colors[:8]):
        others = [*colors[:i], skipped, to_rgb(axes.get_facecolor())]
        assert min(np.linalg.norm(np.subtract(color, c)) for c in others) > 0.25
    # In grey, runs with equal dashes differ in brightness.
    looks = [(run.get_linestyle(), str(run._unscaled_dash_pattern)) for run in runs]
    grey = [np.dot(color, (0.2126, 0.7152, 0.0722)) for color in colors]
    for i in range(8):
        for j in range(i):
            assert looks[i] != looks[j] or abs(grey[i] - grey[j]) > 0.1, (i, j)
    assert looks[8] != looks[0] and looks[0][0] == looks[4][0] == "-"


def test_a_run_takes_a_color_unlike_those_of_all_lines_on_the_axes():
    axes = plt.subplots()[1]
    axes.plot([8.0, 8.0], color="tab:blue")
    axes.axhline(65504.0, color="tab:orange")
    plot_scale([8.0], ax=axes)
    assert to_rgb(axes.lines[-1].get_color()) == to_rgb("#009e73")
    alone = plot_scale([8.0])
    assert to_rgb(alone.lines[0].get_color()) == to_rgb("#0072b2")


@pytest.mark.parametrize("name", ["c", "color"])
def test_a_style_is_passed_on_by_any_of_its_names(name):
    axes = plot_scale([8.0], **{name: "k"}, lw=3, ls=":", ms=4, alpha=0.5)
    [line] = axes.lines
    assert (line.get_color(), line.get_linewidth(), line.get_linestyle()) == (
        "k",
        3,
        ":",
    )
    assert (line.get_markersize(), line.get_alpha()) == (4, 0.5)


def test_dashes_are_the_users_where_a_color_or_dashes_are():
    axes = plot_scale([8.0], color="0.6")
    plot_scale([8.0], ax=axes, color="tab:red")
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-"]
    plot_scale([8.0], ax=axes)
    plot_scale([8.0], ax=axes, ls="-", color=None)
    assert [line.get_color() for line in axes.lines[2:]] == ["#0072b2", "#e69f00"]
    assert axes.lines[3].get_linestyle() == "-"
    with pytest.raises(TypeError, match="aliases of one another"):
        plot_scale([8.0], c="k", color="k")


def test_one_run_has_the_color_of_the_text():
    for style in ("default", "dark_background"):
        with plt.style.context(style):
            axes = plt.subplots()[1]
            for _ in range(8):
                plot_scale([8.0], ax=axes)
            text = to_rgb(axes.xaxis.label.get_color())
            assert text in [to_rgb(line.get_color()) for line in axes.lines], style


def test_a_skipped_step_is_marked_where_it_begins():
    marks = plot_scale([8.0, 8.0, 4.0], [False, True, True]).lines[1]
    np.testing.assert_array_equal(marks.get_xydata(), [[1, 8], [2, 4]])


def test_ticks_that_the_user_placed_stay():
    axes = plt.subplots()[1]
    axes.set_xticks([0.5, 1.5])
    plot_scale([8.0, 16.0], ax=axes)
    assert list(axes.get_xticks()) == [0.5, 1.5]


def test_a_constant_scale_and_none_at_all_can_be_drawn():
    axes = plot_scale([128.0] * 5)
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    assert low < 128 < high and axes.get_legend() is None
    assert 128 in [y for y in axes.get_yticks() if low < y < high]
    plot_scale([]).figure.draw_without_rendering()
    plot_scale([], []).figure.draw_without_rendering()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "uint8"])
def test_scales_of_any_type_of_numbers_are_drawn(dtype):
    axes = plot_scale(jnp.array([8, 16], dtype))
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [8, 16, 16])


@pytest.mark.parametrize(
    "scales",
    [8.0, [[8.0]], [0.0], [-1.0], [np.nan], [np.inf], "8", [None], [8.0, "x"], [8j]],
)
def test_what_are_no_scales_is_refused(scales):
    with pytest.raises(ValueError, match="`scales` must be numbers above 0, one for"):
        plot_scale(scales)


@pytest.mark.parametrize(
    "skipped",
    [
        [True, False],
        (1, 0),
        [1.0, 0.0],
        np.array([1, 0], np.uint8),
        jnp.array([1, 0], jnp.bfloat16),
        jnp.array([True, False]),
    ],
    ids=repr,
)
def test_flags_may_be_zeros_and_ones(skipped):
    axes = plot_scale([8.0, 4.0], skipped)
    np.testing.assert_array_equal(axes.lines[1].get_xydata(), [[0, 8]])


def test_no_flags_and_no_skipped_steps_are_drawn_without_marks():
    for skipped in (None, [0, 0], [False, False]):
        axes = plot_scale([8.0, 4.0], skipped)
        assert len(axes.lines) == 1 and axes.get_legend() is None


@pytest.mark.parametrize(
    "skipped",
    [True, [True], [1], [2, 0], [-1, 0], [0.5, 0.0], [np.nan, 1.0], [1j, 0]]
    + [[None, True], ["1", "0"], [[True, False]], "no", np.array([1, 2])],
    ids=repr,
)
def test_what_are_no_flags_is_refused(skipped):
    with pytest.raises(ValueError, match="`skipped` must be 2 booleans, one for each"):
        plot_scale([8.0, 8.0], skipped)


def test_traced_flags_are_refused():
    with pytest.raises(ValueError, match="`skipped` must hold concrete numbers, got a"):
        jax.jit(lambda x: plot_scale([8.0, 8.0], x) and x)(jnp.ones(2, bool))
