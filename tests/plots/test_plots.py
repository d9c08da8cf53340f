"""The plots: what they draw, where their texts are, what they refuse."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plt.switch_backend("Agg")
plot_range, plot_scale = ls.plots.plot_gradient_range, ls.plots.plot_loss_scale


# Octaves -30, -20, -1, 14 (twice).
GRADS = {
    "w": np.float32([1.5, 0.0, np.nan]) * np.float32(2.0**-30),
    "b": [np.array([-(2.0**-20), 0.5], jnp.bfloat16), np.float16([2.0**14])],
    "z": np.complex64([2.0**14 * 1j]),
    "number": np.arange(3),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


SHIFTED = [(0.5, -1, "2^-1"), (jnp.float32(1000), np.log2(1000), "1,000")]


@pytest.mark.parametrize(("scale", "shift", "label"), SHIFTED)
def test_octaves_have_their_shares_before_and_after_scaling(scale, shift, label):
    axes = plot_range(GRADS, loss_scale=scale)
    assert legend(axes)[:2] == ["unscaled", f"scaled by {label}"]
    for patch, moved in zip(axes.patches[:2], (0, shift), strict=True):
        values, edges, _ = patch.get_data()
        np.testing.assert_allclose(edges, np.arange(-30, 16) + moved)
        octaves = {i - 30: v for i, v in enumerate(values) if v}
        assert octaves == {-30: 0.2, -20: 0.2, -1: 0.2, 14: 0.4}
    assert axes.get_ylim() == (0, pytest.approx(1.05 * 0.4))


EACH = "lost {} subnormal {} normal {} overflow {}"
ZONES = [
    (0.5, ["20.0% → 20.0%", "20.0% → 20.0%", "60.0% → 60.0%", "0% → 0%"]),
    (1e3, ["20.0% → 0%", "20.0% → 20.0%", "60.0% → 40.0%", "0% → 40.0%"]),
]


@pytest.mark.parametrize(("scale", "shares"), ZONES)
def test_zones_have_their_shares_before_and_after_scaling(scale, shares):
    shown = " ".join(legend(plot_range(GRADS, loss_scale=scale))[2:])
    assert shown == EACH.format(*shares)


def test_zones_show_no_0_and_no_100_percent_unless_exact():
    shown = " ".join(legend(plot_range(np.float32([1e-9] + [1.0] * 1999))))
    assert shown == EACH.format("<0.1%", "0%", ">99.9%", "0%")


@pytest.mark.parametrize("grads", [{}, np.float32([0, np.nan])], ids=["none", "NaN"])
def test_zones_are_drawn_without_any_gradient_to_draw(grads):
    axes = plot_range(grads)
    assert " ".join(legend(axes)) == EACH.format("0%", "0%", "0%", "0%")
    assert axes.get_xlim()[0] > -40 and axes.get_ylim() == (0, pytest.approx(1.05))


def test_zones_end_at_the_powers_of_two_of_the_dtype():
    axes = plot_range(GRADS, dtype="bfloat16")
    low, high = axes.get_xlim()
    zones = axes.patches[1:]
    ends = [(zone.get_x(), zone.get_x() + zone.get_width()) for zone in zones]
    edges = [low, -134, -126, 128, high]
    np.testing.assert_allclose(ends, [*itertools.pairwise(edges)], atol=0.3)
    assert len({zone.get_hatch() for zone in zones}) == 4  # for those without colors


FOUR = np.float32([1, np.nan, np.inf, -np.inf])
TITLES = {
    "7 gradients in the range of float16\n14.3% already zero, 1 NaN or inf": GRADS,
    "4 gradients in the range of float16\n3 NaN or inf": FOUR,
    "2 gradients in the range of float16": np.float32([1, 2]),
}


@pytest.mark.parametrize(("title", "grads"), TITLES.items(), ids=TITLES)
def test_title_counts_gradients_outside_all_bars(title, grads):
    assert plot_range(grads).get_title() == title


def test_scale_is_drawn_by_steps_on_a_log2_axis_and_skips_above_it():
    axes = plot_scale(jnp.array([8, 16, 8], "bfloat16"), jnp.array([0, 1, 1]))
    line, marks = axes.lines
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(line.get_xydata(), [[0, 8], [1, 16], [2, 8], [3, 8]])
    np.testing.assert_array_equal(marks.get_xydata(), [[1, 16], [2, 8]])
    assert marks.get_zorder() > line.get_zorder()
    assert (axes.get_yscale(), axes.get_xlabel()) == ("log", "step")
    assert axes.yaxis.get_transform().base == 2 and axes.get_ylabel() == "loss scale"


def test_runs_share_axes_and_an_entry_for_skipped_steps():
    axes = plt.subplots()[1]
    for color in ("red", "black"):
        assert plot_scale([8.0, 16.0], [True, False], ax=axes, color=color) is axes
    assert [line.get_color() for line in axes.lines[::2]] == ["red", "black"]
    assert legend(axes) == ["skipped step"]


def test_constant_scale_has_a_tick_and_no_marks_and_none_is_drawn_too():
    axes = plot_scale([128.0] * 5, [0] * 5)
    low, high = axes.get_ylim()
    assert low < 128 < high and len(axes.lines) == 1 and axes.get_legend() is None
    assert 128 in [y for y in axes.get_yticks() if low < y < high]
    plot_scale([], []).figure.draw_without_rendering()
    assert len(plot_scale([8.0, 16.0]).lines) == 1


SPREAD = [np.float32([0, np.nan, *np.exp2(np.linspace(-38, -6, 330))])]


def test_nothing_is_cut_off_or_overlaps():
    figure = plt.figure(figsize=(13, 5))
    axes = figure.subfigures(1, 2)[1].subplots(2)
    plot_range(SPREAD, loss_scale=1e3, dtype="bfloat16", ax=axes[0])
    plot_scale(2.0 ** (np.arange(60) // 5), np.arange(60) % 9 == 8, ax=axes[1])
    figure.draw_without_rendering()
    inside, boxes = axes[0].figure.bbox, [ax.get_tightbbox() for ax in axes]
    for ax, box in zip(axes, boxes, strict=True):
        assert np.all(box.min >= inside.min) and np.all(box.max <= inside.max)
        assert ax.get_legend().get_window_extent().x0 > ax.bbox.x1
    assert not boxes[0].overlaps(boxes[1])


STATES = [ls.DynamicLossScale().init()]
BAD_SCALES = (8.0, [[8.0]], ["x"], STATES, [0.0, 1.0], [np.nan], [np.inf])
BAD_FLAGS = (True, [True], [2, 0], [np.nan, 1.0], ["1", "0"], [True] * 3)
REFUSED = [
    *((plot_scale, (x,), "`scales` must be numbers above 0") for x in BAD_SCALES),
    *((plot_scale, ([8.0, 8.0], x), "`skipped` must be 2 bool") for x in BAD_FLAGS),
    (plot_range, ("x",), "`grads` must hold only arrays"),
]


@pytest.mark.parametrize(("plot", "arguments", "words"), REFUSED)
def test_plots_refuse_before_they_make_a_figure(plot, arguments, words):
    with pytest.raises(ValueError, match=words):
        plot(*arguments)
    assert plt.get_fignums() == []


PLOTS = {
    "grads": plot_range,
    "loss_scale": lambda x: plot_range(SPREAD, loss_scale=x),
    "scales": plot_scale,
    "skipped": lambda x: plot_scale([8.0], x),
}


@pytest.mark.parametrize("name", PLOTS)
def test_plots_refuse_traced_values(name):
    with pytest.raises(ValueError, match=f"`{name}` must hold concrete numbers"):
        jax.eval_shape(PLOTS[name], np.ones(1))


def test_plots_name_the_package_to_install_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: plot_range(SPREAD), lambda: plot_scale([1.0])):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()
