"""The rules against the statements of their documentation."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import noted
from shared import slow_but
from simulated_rules import Simulated
from training import run_rule

import optax_lossscale as ls

FACTORS = {"growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 3}
LIMITS = {"min_scale": 2.0, "max_scale": 20.0}
RULES = [
    ls.FixedLossScale(3.0),
    *(
        ls.DynamicLossScale(8.0, hysteresis=2, hysteresis_refill=x, **FACTORS, **LIMITS)
        for x in ("finite", "growth", "change")
    ),
    *(
        ls.HeadroomLossScale(half_life=x, headroom=4, max_scale=2.0**40)
        for x in (1, 30)
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_does_as_documented(rule):
    rng = np.random.default_rng(0)
    flags = rng.random(250) > np.repeat([0.1, 0.6], 125)
    magnitudes = 2.0 ** rng.uniform(-30, -5, 250)
    magnitudes[100:200] /= 2.0**10
    states, simulated = run_rule(rule, flags, magnitudes), Simulated(rule)
    for step, (finite, largest) in enumerate(zip(flags, magnitudes, strict=True)):
        simulated.update(finite, np.float32(largest))
        state = jax.tree.map(operator.itemgetter(step), states)
        with noted(f"step {step}"):
            simulated.assert_is(state)
    if isinstance(rule, ls.DynamicLossScale):
        assert {*LIMITS.values()} < {*states.loss_scale.tolist()}, "it meets both"


def test_shorter_interval_than_the_tracker_grows_at_once():
    """PyTorch compares with ``==`` and would not grow before the next overflow."""
    state = ls.DynamicLossScale().init()._replace(growth_tracker=jnp.int32(1500))
    state = ls.DynamicLossScale(growth_interval=100).update(state, True)
    assert (float(state.loss_scale), int(state.growth_tracker)) == (2.0**16, 0)


SMALLEST, LARGEST = 2.0**-126, 2.0**126
DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("headroom", [0.0, 3.0, 10.0, 0.5, 6.3])
@pytest.mark.parametrize("dtype", slow_but(("float16",), DTYPES))
def test_scale_is_the_largest_power_of_two_within_the_bound(dtype, headroom):
    """For magnitudes right around the largest that each scale leaves below it."""
    limits = {"dtype": dtype, "min_scale": SMALLEST, "max_scale": LARGEST}
    rule = ls.HeadroomLossScale(headroom=headroom, **limits)
    top = float(jnp.finfo(dtype).max) / 2.0**headroom
    at = [x for k in range(-126, 127, 3) if SMALLEST < (x := top * 2.0**-k) < 2.0**127]
    bits = np.float32(at).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    magnitudes = bits.ravel().view(np.float32)
    state = jax.jit(jax.vmap(lambda m: rule.update(rule.init(), True, m)))(magnitudes)
    # Exact: a power of two times a float32.
    scaled, scale = magnitudes * np.float64(state.loss_scale), state.loss_scale
    bound = top * (1 + 2.0**-23)  # a float32
    assert np.all((scaled <= bound) | (scale == SMALLEST))
    assert np.all((2 * scaled > top) | (scale == LARGEST))


def test_rule_keeps_a_scale_that_retries_lowered():
    """A memory of the gradient that overflowed keeps it low."""
    rule = ls.HeadroomLossScale()
    state = rule.update(rule.init(), True, 1.0)
    scale = float(state.loss_scale)
    new = state._replace(loss_scale=jnp.float32(scale / 64))
    for _ in range(50):
        new = rule.update(new, True, 1.0)
        assert float(new.loss_scale) == scale / 64
    raised = state._replace(loss_scale=jnp.float32(scale * 64))
    assert float(rule.update(raised, True, 1.0).loss_scale) == scale


def test_rule_backs_off_from_a_scale_whose_gradients_no_float32_holds():
    rule = ls.HeadroomLossScale(min_scale=SMALLEST)
    state = rule.init()._replace(loss_scale=jnp.float32(2.0**-120))
    assert float(rule.update(state, False).loss_scale) == 2.0**-122


def test_rule_with_less_headroom_raises_the_scale_slowly():
    """It takes the lower scale for one that retries have lowered."""
    careful = ls.HeadroomLossScale(headroom=6)
    bold = ls.HeadroomLossScale(headroom=3, half_life=1)
    state = careful.update(careful.init(), True, 1e-3)
    scales = []
    for _ in range(5):
        state = bold.update(state, True, 1e-3)
        scales.append(float(state.loss_scale) / 2.0**19)
    assert scales == [2.0, 4.0, 8.0, 8.0, 8.0]
