"""suggest_loss_scale."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_oracle import host, oracle

import optax_lossscale as ls

# A program each: all of one type, and others of other types.
KINDS = [("float16", 0.0), ("float16", 2.5), ("float16", 20.0), ("bfloat16", 2.5)]
KINDS += [("float8_e5m2", 0.0)]


@given(
    exponents=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9),
    kind=st.sampled_from(KINDS),
)
def test_suggested_is_the_largest_scale_within_headroom(exponents, kind):
    dtype, headroom = kind
    x = np.resize(np.exp2(np.array(exponents, np.float32)), 9).astype(np.float32)
    grads = {"w": x, "not counted": np.float32([0, np.nan, -np.inf])}
    arguments = {"dtype": dtype, "headroom": headroom, "min_scale": 2.0**-126}
    suggested = host(ls.suggest_loss_scale(grads, **arguments, max_scale=2.0**126))
    scale = suggested.loss_scale
    assert math.frexp(scale)[0] == 0.5
    largest = math.log2(float(jnp.finfo(dtype).max)) - headroom
    if 2.0**-126 < scale < 2.0**126:
        assert -1 - 1e-4 < math.log2(x.max() * scale) - largest <= 1e-4
    before, after = (oracle(x, s, dtype)["underflow"] / 9 for s in (1.0, scale))
    assert suggested.lost == pytest.approx(after, abs=1e-6)
    assert suggested.rescued == pytest.approx(max(before - after, 0), abs=1e-6)
    assert suggested.informative


# Bounds, the largest magnitude, and the suggested scale.
SUGGESTED = [
    # Gradients that are all zero tell nothing; XLA takes the last for zero on CPU.
    ({}, 0.0, 2.0**15),
    ({}, np.nan, 2.0**15),
    ({}, 1e-45, 2.0**15),
    ({"max_scale": 8.0}, 0.0, 8.0),
    ({"min_scale": 2.0**20}, 0.0, 2.0**20),
    ({}, 2e-38, 2.0**24),
    ({}, 3e38, 2.0**-24),
    ({"min_scale": 8.0, "max_scale": 8.0}, 1.0, 8.0),
]


@pytest.mark.parametrize(("bounds", "magnitude", "scale"), SUGGESTED)
def test_rules_take_the_suggestion_within_the_same_bounds(bounds, magnitude, scale):
    grads = [np.array([magnitude, np.inf], np.float32)]
    suggested = ls.suggest_loss_scale(grads, **bounds)
    assert host(suggested.loss_scale) == scale
    assert host(suggested.informative) is bool(magnitude > 1e-40)
    for rule in (ls.DynamicLossScale, ls.HeadroomLossScale):
        limits = {"min_scale": min(scale, 1.0)} | bounds
        assert rule(suggested.loss_scale, **limits).init_scale == scale


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_scale", 0), ("max_scale", 2.0**127), ("headroom", -1), ("headroom", "3")],
)
def test_a_number_outside_its_range_or_traced_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a number from "):
        ls.suggest_loss_scale([np.ones(2)], **{name: value})
    with pytest.raises(ValueError, match=f"`{name}` must be .*, got a traced value"):
        jax.jit(lambda x: ls.suggest_loss_scale([np.ones(2)], **{name: x}))(1.0)


def test_bounds_in_the_wrong_order_are_refused_under_their_names():
    with pytest.raises(ValueError, match="`min_scale` must not exceed `max_scale`"):
        ls.suggest_loss_scale([np.ones(2)], min_scale=8.0, max_scale=2.0)


def test_several_batches_are_taken_together_compiled_or_not():
    batches = [{"w": np.float32([1e-9, 1e-6]) * np.float32(x)} for x in (1.0, 1e3, 0.0)]
    suggested = ls.suggest_loss_scale(batches)
    assert host(suggested) == (2.0**22, 0.25, 0.0, True)
    assert host(jax.jit(ls.suggest_loss_scale)(batches)) == host(suggested)


def test_a_suggestion_shows_a_table():
    grads = [np.float32([0.0, 2e-5, 2e-2]), np.float32([1e-9, 2e-6, 2e-3])]
    shown = repr(ls.suggest_loss_scale(grads))
    assert shown.startswith("loss_scale   2**18\nrescued      0.2\nlost ")
