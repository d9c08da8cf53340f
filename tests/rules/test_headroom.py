"""HeadroomLossScale: the headroom is kept, at once, and no more than that."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ls

SMALLEST, LARGEST = 2.0**-126, 2.0**126


@given(
    st.integers(-140, 100),
    st.floats(0.5, 1, exclude_max=True, width=32),
    st.integers(0, 6),
    st.sampled_from(["float16", "float8_e5m2", "bfloat16", "float32"]),
)
def test_the_headroom_is_kept_and_no_more(exponent, mantissa, headroom, dtype):
    rule = ls.HeadroomLossScale(
        headroom=headroom, dtype=dtype, min_scale=SMALLEST, max_scale=LARGEST
    )
    magnitude = float(np.float32(math.ldexp(mantissa, exponent)))
    state = rule.update(rule.init(), True, magnitude)
    scale = float(state.loss_scale)
    assert math.frexp(scale)[0] == 0.5
    top = float(jnp.finfo(dtype).max) / 2.0**headroom
    if magnitude < SMALLEST:
        assert scale == rule.init_scale or scale == LARGEST
    else:
        assert scale * magnitude <= top or scale == SMALLEST
        assert 2 * scale * magnitude > top or scale == LARGEST


def test_the_headroom_rule_follows_at_once_and_forgets_slowly():
    rule = ls.HeadroomLossScale(half_life=100, headroom=4, max_scale=2.0**40)
    state = rule.update(rule.init(), True, 0.99 * 2.0**-20)
    assert float(state.loss_scale) == 2.0**32
    state = rule.update(state, True, 0.99 * 2.0**-10)
    assert float(state.loss_scale) == 2.0**22
    for _ in range(98):
        state = rule.update(state, True, 2.0**-20)
        assert float(state.loss_scale) == 2.0**22
    for _ in range(2):
        state = rule.update(state, True, 2.0**-20)
    assert float(state.loss_scale) == 2.0**23


def test_an_overflow_of_what_the_headroom_rule_cannot_see_is_remembered():
    rule = ls.HeadroomLossScale(half_life=100)
    state = rule.update(rule.init(), True, 2.0**-10)
    before = float(state.loss_scale)
    state = rule.update(state, False, 2.0**-10)
    assert float(state.loss_scale) == before / 4
    for _ in range(90):
        state = rule.update(state, True, 2.0**-10)
        assert float(state.loss_scale) == before / 4
    for _ in range(120):
        state = rule.update(state, True, 2.0**-10)
    assert float(state.loss_scale) == before


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_without_headroom_the_largest_gradient_does_not_overflow(dtype):
    rule = ls.HeadroomLossScale(headroom=0, dtype=dtype, max_scale=LARGEST)
    for magnitude in np.linspace(1e-3, 2e-3, 50, dtype=np.float32):
        scale = rule.update(rule.init(), True, magnitude).loss_scale
        assert jnp.isfinite((scale * magnitude).astype(dtype))


@given(
    st.integers(-20, 60),
    st.floats(0, 6, width=32),
    st.sampled_from([0.5, 0.25, 0.125]),
    st.sampled_from(["float16", "bfloat16", "float8_e4m3fn"]),
)
def test_an_overflow_lowers_the_headroom_scale_by_its_factor_and_no_more(
    exponent, headroom, factor, dtype
):
    rule = ls.HeadroomLossScale(
        headroom=headroom,
        dtype=dtype,
        backoff_factor=factor,
        min_scale=2.0**-30,
        max_scale=2.0**70,
    )
    state = rule.init()._replace(loss_scale=jnp.float32(2.0**exponent))
    state = rule.update(state, False, jnp.inf)
    assert float(state.loss_scale) == factor * 2.0**exponent
    if exponent >= 6:  # below, what would overflow bfloat16 is no float32
        after = rule.update(state, True, 2.0**-126)
        assert float(after.loss_scale) == float(state.loss_scale)


def test_an_overflow_never_raises_a_scale_from_below_the_limits():
    rule = ls.HeadroomLossScale(min_scale=1.0)
    state = rule.init()._replace(loss_scale=jnp.float32(0.25))
    assert float(rule.update(state, False).loss_scale) == 0.25
    assert float(rule.update(state, True, 1.0).loss_scale) == 2.0**12


def test_the_headroom_rule_learns_nothing_of_zero_gradients():
    rule = ls.HeadroomLossScale()
    state = rule.update(rule.init(), True, 0.0)
    assert float(state.loss_scale) == rule.init_scale
    assert float(rule.update(state, True).loss_scale) == rule.init_scale
