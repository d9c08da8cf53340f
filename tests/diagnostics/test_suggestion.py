"""suggest_loss_scale."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DATA
from hypothesis import given
from hypothesis import strategies as st
from report_oracle import host, oracle

import optax_lossscale as ls


@given(
    exponents=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9),
    headroom=st.sampled_from([0.0, 2.5, 20.0]),
    dtype=st.sampled_from(["float16", "bfloat16", "float8_e5m2"]),
)
def test_the_suggested_scale_is_the_largest_that_leaves_the_headroom(
    exponents, headroom, dtype
):
    x = np.resize(np.exp2(np.array(exponents, np.float32)), 9).astype(np.float32)
    suggested = host(ls.suggest_loss_scale({"w": x}, dtype=dtype, headroom=headroom))
    scale = suggested.loss_scale
    assert math.frexp(scale)[0] == 0.5
    largest = math.log2(float(jnp.finfo(dtype).max)) - headroom
    top = math.log2(float(x.max()) * scale)
    if 2.0**-126 < scale < 2.0**126:
        assert largest - 1 - 1e-4 < top <= largest + 1e-4
    before, after = (oracle(x, s, dtype)["underflow"] / 9 for s in (1.0, scale))
    assert suggested.lost == pytest.approx(after, abs=1e-6)
    assert suggested.rescued == pytest.approx(before - after, abs=1e-6)


def test_elements_that_are_not_finite_or_zero_are_not_what_a_scale_rescues():
    grads = {"w": jnp.array([1e-9, 1e-3, jnp.nan, jnp.inf, 0.0])}
    suggested = ls.suggest_loss_scale(grads)
    assert host(suggested) == ls.SuggestedLossScale(2.0**22, 0.5, 0.0)
    compiled = jax.jit(ls.suggest_loss_scale)(grads)
    assert host(compiled) == host(suggested)
    rule = ls.FixedLossScale(suggested.loss_scale)
    assert rule.loss_scale == 2.0**22


def test_it_is_what_the_headroom_rule_takes():
    magnitudes = np.load(DATA / "magnitudes.npz")
    magnitude = magnitudes["recurrent_magnitude"][0]
    rule = ls.HeadroomLossScale()
    state = rule.update(rule.init(), True, magnitude)
    suggested = ls.suggest_loss_scale({"w": np.array([magnitude])})
    assert float(suggested.loss_scale) == float(state.loss_scale)


@pytest.mark.parametrize("headroom", [-1, 127, math.nan, "3", None])
def test_a_headroom_outside_its_range_is_refused(headroom):
    with pytest.raises(ValueError, match="`headroom` must be a number from 0 to 126"):
        ls.suggest_loss_scale({"w": jnp.ones(2)}, headroom=headroom)
