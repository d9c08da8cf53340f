"""plot_gradient_range."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_range = ls.plots.plot_gradient_range

# Octaves -30, -20, -1, 14 (twice).
GRADS = {
    "w": jnp.array([1.5, 0.0, jnp.nan]) * 2.0**-30,
    "b": [jnp.array([-(2.0**-20), 0.5], jnp.bfloat16), jnp.full(1, 2.0**14, "float16")],
    "z": jnp.full(1, 2.0**14 * 1j),
    "number": jnp.arange(3),
}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("scale", "shift", "label"),
    [(4.0, 2, "2^2"), (0.5, -1, "2^-1"), (jnp.float32(1000), np.log2(1000), "1,000")],
)
def test_the_histogram_counts_each_octave_before_and_after(scale, shift, label):
    axes = plot_range(GRADS, loss_scale=scale)
    assert legend(axes)[:2] == ["unscaled", f"scaled by {label}"]
    low, high = axes.get_xlim()
    for patch, moved in zip(axes.patches[:2], (0, shift), strict=True):
        values, edges, _ = patch.get_data()
        np.testing.assert_allclose(edges, np.arange(-30, 16) + moved)
        octaves = {i - 30: v for i, v in enumerate(values) if v}
        assert octaves == {-30: 0.2, -20: 0.2, -1: 0.2, 14: 0.4}
        assert low < edges[0] and edges[-1] < high and 0.4 < axes.get_ylim()[1] < 0.5


@pytest.mark.parametrize(
    ("scale", "dtype", "shares"),
    [
        (1.0, "float16", ["20.0%", "20.0%", "60.0%", "0%"]),
        (4.0, "float16", ["20.0%", "20.0%", "20.0%", "40.0%"]),
        (4.0, "bfloat16", ["0%", "0%", "100%", "0%"]),
    ],
)
def test_the_legend_has_the_share_in_each_zone(scale, dtype, shares):
    texts = legend(plot_range(GRADS, loss_scale=scale, dtype=dtype))
    zones = [text.split() for text in texts[-4:]]
    assert [zone[0] for zone in zones] == ["lost", "subnormal", "normal", "overflow"]
    assert [zone[-1] for zone in zones] == shares


def test_a_few_elements_do_not_look_like_none_nor_nearly_all_like_all():
    grads = [np.float32([1e-9] + [1.0] * 5000)]
    assert legend(plot_range(grads))[::2] == ["lost <0.1%", "normal >99.9%"]


@pytest.mark.parametrize(
    ("dtype", "edges"),
    [
        *(("float16", [-25, -14, 16]), (jnp.bfloat16, [-134, -126, 128])),
        *(("float8_e5m2", [-17, -14, 16]), ("float64", [-1074, -1022, 1024])),
    ],
)
def test_the_zones_are_where_the_type_has_them(dtype, edges):
    axes = plot_range(GRADS, dtype=dtype)
    zones = axes.patches[1:]
    left = np.array([zone.get_x() for zone in zones])
    right = left + [zone.get_width() for zone in zones]
    np.testing.assert_allclose(left, [axes.get_xlim()[0], *edges], atol=0.3)
    np.testing.assert_allclose(right, [*edges, axes.get_xlim()[1]], atol=0.3)
    assert len({zone.get_hatch() for zone in zones}) == 4  # for those without colors


def test_what_is_in_no_bar_is_in_the_title():
    title = "7 gradients in the range of float16\n14.3% already zero, 1 NaN or inf"
    assert plot_range(GRADS).get_title() == title
    axes = plot_range([jnp.ones(2)])
    labels = axes.get_title(), axes.get_xlabel(), axes.get_ylabel()
    title = "2 gradients in the range of float16"
    assert labels == (title, "log2 |gradient|", "share of elements")


@pytest.mark.parametrize("grads", [{}, [jnp.zeros(3)], [jnp.full(2, jnp.nan)]])
def test_nothing_to_draw_leaves_the_zones(grads):
    axes = plot_range(grads)
    assert legend(axes)[0] == "lost 0%" and axes.get_xlim()[0] > -40


def test_what_cannot_be_drawn_is_refused_before_a_figure_is_made():
    for refused in ({"grads": 1.0}, {"loss_scale": jnp.float32(0)}, {"dtype": "int8"}):
        with pytest.raises(ValueError, match=f"`{[*refused][0]}` must be"):
            plot_range(**{"grads": GRADS, **refused})
    assert plt.get_fignums() == []
