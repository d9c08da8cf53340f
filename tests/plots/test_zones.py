"""The names of the zones, at the top of a gradient range."""

import functools

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import ConnectionPatch

import optax_lossscale as ls

GRADS = [np.exp2(np.linspace(-38.0, -6.0, 330)).astype(np.float32)]
DTYPES = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]


@functools.cache
def draw(dtype, size=(3.3, 2.2), layout="constrained"):
    axes = plt.subplots(figsize=size, layout=layout)[1]
    ls.plots.plot_gradient_range(GRADS, loss_scale=2.0**15, dtype=dtype, ax=axes)
    axes.figure.draw_without_rendering()
    return axes, {
        t.get_text().split("\n")[0]: t.get_window_extent() for t in axes.texts
    }


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        ((3.3, 2.2), "constrained"),
        pytest.param((3.3, 2.2), None, marks=pytest.mark.slow),
        pytest.param((7.5, 3.6), "constrained", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_names_lie_in_the_axes_beside_each_other_and_above_the_bars(size, layout):
    for dtype in DTYPES:
        axes, boxes = draw(dtype, size, layout)
        assert list(boxes) == ["lost", "subnormal", "normal", "overflow"]
        row = list(boxes.values())
        for left, right in zip(row, row[1:], strict=False):
            assert left.x1 < right.x0, dtype
        assert axes.bbox.x0 < row[0].x0 and row[-1].x1 < axes.bbox.x1, dtype
        peak = max(axes.patches[0].get_data().values)
        top = axes.transData.transform((0, peak))[1]
        assert all(top < box.y0 and box.y1 < axes.bbox.y1 for box in row), dtype


def leaders(axes):
    return [patch for patch in axes.patches if isinstance(patch, ConnectionPatch)]


def test_a_line_leads_from_a_name_beside_its_zone_to_the_zone():
    axes, boxes = draw("bfloat16")
    [leader] = leaders(axes)
    (x, y), (end_x, end_y) = leader.get_window_extent().get_points()[[1, 0]]
    zone = [axes.transData.transform((edge, 0))[0] for edge in (-134, -126)]
    name = boxes["subnormal"]
    assert sum(zone) / 2 < name.x0  # beside it
    assert x == pytest.approx((name.x0 + name.x1) / 2, abs=1.5)
    assert y == pytest.approx(name.y0, abs=1.5)
    assert zone[0] < end_x < zone[1] and end_y < y
    bars = [bar for bar in axes.patches[0].get_data().values if bar]
    assert axes.transData.transform((0, max(bars)))[1] < end_y


def test_no_line_leads_from_a_name_that_is_in_its_zone():
    for size in [(3.3, 2.2), (7.5, 3.6)]:
        assert leaders(draw("float16", size)[0]) == []


def test_a_zone_has_the_color_of_its_name_in_every_type():
    colors = [
        [patch.get_facecolor()[:3] for patch in draw(dtype)[0].patches[2:6]]
        for dtype in ("float16", "bfloat16")
    ]
    assert colors[0] == colors[1] and len(set(colors[0])) == 4
