"""plot_gradient_range."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

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
    ("scale", "shift", "label", "shares"),
    [
        (0.5, -1, "2^-1", "20.0% 20.0% 60.0% 0%"),
        (jnp.float32(1000), np.log2(1000), "1,000", "0% 20.0% 40.0% 40.0%"),
    ],
)
def test_octaves_and_zones_have_their_shares_before_and_after(
    scale, shift, label, shares
):
    axes = plot_range(GRADS, loss_scale=scale)
    texts = legend(axes)
    assert texts[:2] == ["unscaled", f"scaled by {label}"]
    for patch, moved in zip(axes.patches[:2], (0, shift), strict=True):
        values, edges, _ = patch.get_data()
        np.testing.assert_allclose(edges, np.arange(-30, 16) + moved)
        octaves = {i - 30: v for i, v in enumerate(values) if v}
        assert octaves == {-30: 0.2, -20: 0.2, -1: 0.2, 14: 0.4}
    assert 0.4 < axes.get_ylim()[1] < 0.5
    zones = zip(["20.0%", "20.0%", "60.0%", "0%"], shares.split(), strict=True)
    shown = [f"{before} → {after}" for before, after in zones]
    names = "lost", "subnormal", "normal", "overflow"
    assert texts[2:] == list(map("{} {}".format, names, shown))


def test_the_zones_are_where_the_type_has_them():
    axes = plot_range(GRADS, dtype="bfloat16")
    low, high = axes.get_xlim()
    zones = axes.patches[1:]
    ends = [(zone.get_x(), zone.get_x() + zone.get_width()) for zone in zones]
    edges = [low, -134, -126, 128, high]
    np.testing.assert_allclose(ends, [*itertools.pairwise(edges)], atol=0.3)
    assert len({zone.get_hatch() for zone in zones}) == 4  # for those without colors


TITLES = [
    (GRADS, "7 gradients in the range of float16\n14.3% already zero, 1 NaN or inf"),
    (np.float32([1, np.nan, np.inf, -np.inf]), "4 gradients in the .*\n3 NaN or inf"),
    (np.float32([1, 2]), "2 gradients in the range of float16"),
]


@pytest.mark.parametrize(("grads", "title"), TITLES)
def test_title_counts_what_is_in_no_bar(grads, title):
    assert re.fullmatch(title, plot_range(grads).get_title())


def test_shares_round_to_nothing_and_to_all_only_if_they_are():
    grads = np.float32([1e-9] + [1.0] * 1999)
    assert legend(plot_range(grads)) == [
        *("lost <0.1%", "subnormal 0%", "normal >99.9%", "overflow 0%")
    ]


def test_nothing_to_draw_leaves_the_zones():
    for grads in ({}, [jnp.array([0.0, jnp.nan])]):
        axes = plot_range(grads)
        assert legend(axes)[0] == "lost 0%" and axes.get_xlim()[0] > -40
