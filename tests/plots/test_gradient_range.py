"""plot_gradient_range, and what both plots refuse."""

import builtins
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt

import optax_lossscale as ls

plot_range, plot_scale = ls.plots.plot_gradient_range, ls.plots.plot_loss_scale


def zones(axes):
    """What is written above the zones: name, before, after."""
    return {
        name: shares for name, *shares in (t.get_text().split("\n") for t in axes.texts)
    }


# Octaves -30, -20, -1, 14 (twice).
GRADS = {
    "w": jnp.array([1.5, 0.0, jnp.nan]) * 2.0**-30,
    "b": [jnp.array([-(2.0**-20), 0.5]), jnp.full(2, 2.0**14)],
    "number": jnp.arange(3),
}


@functools.cache
def drawn(**arguments):
    """What several tests only look at; to draw it takes long."""
    return plot_range(GRADS, **arguments)


def test_the_histogram_counts_each_octave_before_and_after():
    axes = drawn(loss_scale=4.0)
    before, after = axes.patches[:2]
    for patch, shift in ((before, 0), (after, 2)):
        values, edges, _ = patch.get_data()
        np.testing.assert_array_equal(edges, np.arange(-30, 16) + shift)
        octaves = {int(edges[i]) - shift: v for i, v in enumerate(values) if v}
        assert octaves == {-30: 0.2, -20: 0.2, -1: 0.2, 14: 0.4}


def test_the_zones_name_the_shares():
    assert zones(drawn(loss_scale=4.0)) == {
        "lost": ["20.0%", "→ 20.0%"],
        "subnormal": ["20.0%", "→ 20.0%"],
        "normal": ["60.0%", "→ 20.0%"],
        "overflow": ["0%", "→ 40.0%"],
    }
    assert zones(drawn())["normal"] == ["60.0%"]
    assert zones(drawn(loss_scale=4.0, dtype="bfloat16"))["normal"] == [
        "100%",
        "→ 100%",
    ]


def test_the_zones_are_where_the_type_has_them():
    axes = drawn()
    edges = [line.get_xdata()[0] for line in axes.lines]
    np.testing.assert_allclose(edges, [-25, -14, 16], atol=2e-3)
    assert edges[2] == np.log2(65520)
    for dtype in (jnp.bfloat16, "float8_e5m2", "float32", "float64"):
        edges = [line.get_xdata()[0] for line in plot_range(GRADS, dtype=dtype).lines]
        assert edges == sorted(edges) and np.all(np.isfinite(edges)), dtype


def test_what_is_in_no_bar_is_in_the_title():
    title = drawn().get_title()
    assert title == (
        "7 gradients in the range of float16, 14.3% already zero, 1 NaN or inf"
    )
    assert (
        plot_range([jnp.ones(2)]).get_title() == "2 gradients in the range of float16"
    )


def test_labels_and_legend():
    axes = plot_range(GRADS, loss_scale=2.0**15)
    assert axes.get_xlabel() == "log2 |gradient|"
    assert axes.get_ylabel() == "share of elements"
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["unscaled", "scaled by 2^15"]
    assert drawn().get_legend() is None
    texts = plot_range(GRADS, loss_scale=jnp.float32(1000.0)).get_legend().get_texts()
    assert texts[1].get_text() == "scaled by 1,000"


@pytest.mark.parametrize(
    "grads", [{}, None, [jnp.zeros(3)], [jnp.full(2, jnp.nan)], [jnp.zeros((0,))]]
)
def test_nothing_to_draw_leaves_the_zones(grads):
    axes = plot_range(grads, loss_scale=8.0)
    axes.figure.draw_without_rendering()
    assert zones(axes)["lost"] == ["0%", "→ 0%"]
    assert list(axes.get_yticks()) == []


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_gradients_of_any_type_are_drawn(dtype):
    axes = plot_range([jnp.array([0.25, 4.0], dtype)])
    values, edges, _ = axes.patches[0].get_data()
    assert dict(zip(edges, values, strict=False))[-2] == 0.5


def test_it_is_drawn_on_the_axes_given():
    given = plt.subplots()[1]
    assert plot_range(GRADS, ax=given) is given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grads": 1.0}, "`grads` must be a tree of gradients"),
        ({"grads": {"a": np.arange(3)}}, "`grads` must hold floating-point gradients"),
        ({"loss_scale": 0.0}, "`loss_scale` must be one number above 0"),
        ({"loss_scale": jnp.float32(0)}, "`loss_scale` must be one number above 0"),
        ({"loss_scale": "8"}, "`loss_scale` must be one number above 0, got '8'"),
        ({"dtype": "int8"}, "`dtype` must be a floating-point type"),
    ],
)
def test_what_can_not_be_drawn_is_refused_before_a_figure_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_range(**{"grads": GRADS, **arguments})
    assert plt.get_fignums() == []


def test_traced_values_are_refused():
    with pytest.raises(ValueError, match="`grads` must hold concrete numbers, got a"):
        jax.jit(lambda x: plot_range([x]) and x)(jnp.ones(2))
    with pytest.raises(
        ValueError, match="`loss_scale` must hold concrete numbers, got a"
    ):
        jax.jit(lambda x: plot_range(GRADS, loss_scale=x) and x)(2.0)
    with pytest.raises(ValueError, match="`scales` must hold concrete numbers, got a"):
        jax.jit(lambda x: plot_scale(x) and x)(jnp.ones(2))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for draw in (lambda: plot_range(GRADS), lambda: plot_scale([1.0])):
        with pytest.raises(
            ImportError, match=r"pip install 'optax_lossscale\[plots\]'"
        ):
            draw()
