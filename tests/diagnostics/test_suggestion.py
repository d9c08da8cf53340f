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
    # A program each: all of one type, and others of other types.
    kind=st.sampled_from(
        [
            *(("float16", 0.0), ("float16", 2.5), ("float16", 20.0)),
            *(("bfloat16", 2.5), ("float8_e5m2", 0.0)),
        ]
    ),
)
def test_the_suggested_scale_is_the_largest_that_leaves_the_headroom(exponents, kind):
    dtype, headroom = kind
    x = np.resize(np.exp2(np.array(exponents, np.float32)), 9).astype(np.float32)
    bounds = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    suggested = host(
        ls.suggest_loss_scale({"w": x}, dtype=dtype, headroom=headroom, **bounds)
    )
    scale = suggested.loss_scale
    assert math.frexp(scale)[0] == 0.5
    largest = math.log2(float(jnp.finfo(dtype).max)) - headroom
    top = math.log2(float(x.max()) * scale)
    if 2.0**-126 < scale < 2.0**126:
        assert largest - 1 - 1e-4 < top <= largest + 1e-4
    before, after = (oracle(x, s, dtype)["underflow"] / 9 for s in (1.0, scale))
    assert suggested.lost == pytest.approx(after, abs=1e-6)
    assert suggested.rescued == pytest.approx(max(before - after, 0), abs=1e-6)
    assert suggested.informative


def test_elements_that_are_not_finite_or_zero_are_not_what_a_scale_rescues():
    grads = {"w": jnp.array([1e-9, 1e-3, jnp.nan, jnp.inf, 0.0])}
    suggested = ls.suggest_loss_scale(grads)
    assert host(suggested) == ls.SuggestedLossScale(2.0**22, 0.5, 0.0, True)
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


RULES = [
    lambda scale: ls.FixedLossScale(scale),
    lambda scale: ls.DynamicLossScale(init_scale=scale),
    lambda scale: ls.HeadroomLossScale(init_scale=scale),
    lambda scale: ls.LogNormalLossScale(init_scale=scale),
    lambda scale: ls.TolerantLossScale(init_scale=scale),
]


@pytest.mark.parametrize(
    ("magnitude", "scale", "informative"),
    [
        # XLA takes the first for zero on CPU.
        *((0.0, 2.0**15, False), (np.nan, 2.0**15, False), (1e-45, 2.0**15, False)),
        *((2e-38, 2.0**24, True), (1e-12, 2.0**24, True), (1e-3, 2.0**22, True)),
        *((1.0, 2.0**12, True), (1e4, 1.0, True), (3e38, 1.0, True)),
    ],
)
def test_every_rule_takes_what_is_suggested(magnitude, scale, informative):
    grads = [np.array([magnitude, np.inf], np.float32)]
    suggested = ls.suggest_loss_scale(grads)
    assert host(suggested.loss_scale) == scale
    assert host(suggested.informative) is informative
    for rule in RULES:
        assert float(rule(suggested.loss_scale).init().loss_scale) == scale


def test_gradients_that_are_all_zero_tell_nothing():
    grads = {"w": jnp.zeros(3), "b": jnp.array([jnp.nan])}
    assert host(ls.suggest_loss_scale(grads)) == (2.0**15, 0, 0, False)
    for bounds, scale in (({"max_scale": 8.0}, 8.0), ({"min_scale": 2.0**20}, 2.0**20)):
        assert host(ls.suggest_loss_scale(grads, **bounds)) == (scale, 0, 0, False)


@pytest.mark.parametrize(
    ("magnitude", "bounds", "scale"),
    [
        (1e-9, {"max_scale": 2.0**30}, 2.0**30),
        (1e-9, {"max_scale": 1e5}, 2.0**16),
        (1e-9, {"max_scale": 2.0**126}, 2.0**42),
        (1e9, {"min_scale": 2.0**-30}, 2.0**-17),
        (1e9, {"min_scale": 3.0}, 4.0),
        (1e9, {"min_scale": 5.0, "max_scale": 7.0}, 5.0),
        (1e-9, {"min_scale": 5.0, "max_scale": 7.0}, 7.0),
        (1.0, {"min_scale": 8.0, "max_scale": 8.0}, 8.0),
    ],
)
def test_the_scale_is_a_power_of_two_within_the_bounds(magnitude, bounds, scale):
    suggested = ls.suggest_loss_scale([jnp.array([magnitude])], **bounds)
    assert float(suggested.loss_scale) == scale
    ls.DynamicLossScale(init_scale=suggested.loss_scale, **bounds)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_scale": 0}, "`min_scale` must be a number from 2"),
        ({"max_scale": 2.0**127}, "`max_scale` must be a number from 2"),
        ({"min_scale": "1"}, "`min_scale` must be a number from 2"),
        ({"min_scale": 8, "max_scale": 4}, "`min_scale` must not exceed `max_scale`"),
    ],
)
def test_a_bound_outside_its_range_is_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        ls.suggest_loss_scale([jnp.ones(2)], **bounds)
    name = next(iter(bounds))
    with pytest.raises(ValueError, match=f"`{name}` must hold concrete numbers, got a"):
        jax.jit(lambda x: ls.suggest_loss_scale([jnp.ones(2)], **{name: x}))(1.0)


def test_several_batches_are_taken_together():
    batches = [{"w": x * jnp.array([1e-9, 1e-6])} for x in (1.0, 1e3, 0.0)]
    together = {"w": jnp.concatenate([batch["w"] for batch in batches])}
    suggested = host(ls.suggest_loss_scale(batches))
    assert suggested == host(ls.suggest_loss_scale(together))
    assert suggested == (2.0**22, 0.25, 0.0, True)


def test_a_scale_below_one_rescues_nothing():
    grads = [jnp.array([1e9, 1e-9, 1e-5])]
    suggested = ls.suggest_loss_scale(grads, min_scale=2.0**-126)
    assert host(suggested) == (2.0**-17, 0.0, np.float32(2 / 3), True)


def test_shares_of_more_elements_than_int32_counts_are_right():
    @jax.jit  # which never writes the array out
    def suggested(row):
        return ls.suggest_loss_scale([jnp.broadcast_to(row, (2**16, row.size))])

    row = np.full(2**15 + 1, 2.0**-30, np.float32)
    row[:2] = 1.0, 2.0**-60
    shares = [np.float32(n / (2**15 + 1)) for n in (2**15 - 1, 1)]
    assert host(suggested(row)) == (2.0**12, *shares, True)


@pytest.mark.parametrize("headroom", [-1, 127, math.nan, "3", None])
def test_a_headroom_outside_its_range_is_refused(headroom):
    with pytest.raises(ValueError, match="`headroom` must be a number from 0 to 126"):
        ls.suggest_loss_scale({"w": jnp.ones(2)}, headroom=headroom)
