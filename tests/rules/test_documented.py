"""The rules against the statements of their documentation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import slow_but
from training import run_rule

import optax_lossscale as ls

# The scale begins at 8. It grows by 4 after 3 finite steps, up to 20, and backs off by
# half, down to 2, when the hysteresis of 2 is used up.
DYNAMIC = {"growth_factor": 4.0, "growth_interval": 3, "hysteresis": 2}
DYNAMIC |= {"init_scale": 8.0, "min_scale": 2.0, "max_scale": 20.0}
FINITE = "1 1  1  0  1  0  1  1  0  1  1  1  0  0   0 0 0   0   0 0 0 1 1 1"
GROWTH = "1 2  0  0  1  0  1  2  0  1  2  0  0  0   0 0 0   0   0 0 0 1 2 0"
# The scales, and then the hysteresis counter, by what resets that.
COURSES = {
    "finite": (
        "8 8 20 20 20 20 20 20 20 20 20 20 20 10   5 2.5 2  2   2 2 2 2 2 8",
        "2 2  2  1  2  1  2  2  1  2  2  2  1  0   0   0 0  0   0 0 0 2 2 2",
    ),
    "growth": (
        "8 8 20 20 20 10 10 10  5  5  5 20 20 10   5 2.5 2  2   2 2 2 2 2 8",
        "2 2  2  1  1  0  0  0  0  0  0  2  1  0   0   0 0  0   0 0 0 0 0 2",
    ),
    "change": (
        "8 8 20 20 20 10 10 10 10 10 10 20 20 10  10   5 5 2.5 2.5 2 2 2 2 8",
        "2 2  2  1  1  2  2  2  1  1  1  2  1  2   1   2 1  2   1 2 1 1 1 2",
    ),
}


def numbers(text):
    return np.array(text.split(), float)


@pytest.mark.parametrize("refill", COURSES)
def test_dynamic_rule_takes_its_course(refill):
    rule = ls.DynamicLossScale(**DYNAMIC, hysteresis_refill=refill)
    states = run_rule(rule, numbers(FINITE))
    scales, hysteresis = COURSES[refill]
    np.testing.assert_array_equal(states.loss_scale, numbers(scales))
    np.testing.assert_array_equal(states.hysteresis_tracker, numbers(hysteresis))
    np.testing.assert_array_equal(states.growth_tracker, numbers(GROWTH))


# Magnitudes, of which inf overflows, and the scales. A scale of 2**11 leaves 4 octaves
# above 1: 2**11 < 65504 / 2**4 < 2**12.
MEASURED = {
    "the first scale stays until a gradient": ({}, [0, 0, 1], [8, 8, 2**11]),
    "grows by an octave in each half-life": (
        {"half_life": 2},
        [1, 0, 0, 0, 0, 0],
        [2**11, 2**12, 2**12, 2**13, 2**13, 2**14],
    ),
    "falls at once for a larger gradient": ({}, [1, 3, 1], [2**11, 2**10, 2**10]),
    "backs off": (
        {"half_life": 1, "backoff_factor": 0.25},
        [1, math.inf, 0, math.inf, math.inf, 0],
        [2**11, 2**9, 2**10, 2**8, 2**6, 2**7],
    ),
    "overflow is remembered": (
        {"half_life": 1, "min_scale": 4.0},
        [500, math.inf, 0, 0],
        [8, 4, 4, 8],
    ),
    "limits": (
        {"min_scale": 4.0, "max_scale": 32.0, "half_life": 1},
        [1e-6, math.inf, math.inf, 1e6, math.inf, 0, 0, 0, 0],
        [32, 8, 4, 4, 4, 4, 4, 4, 4],
    ),
}


@pytest.mark.parametrize(
    ("arguments", "magnitudes", "scales"), MEASURED.values(), ids=MEASURED
)
def test_headroom_rule_takes_its_course(arguments, magnitudes, scales):
    rule = ls.HeadroomLossScale(8.0, headroom=4, **arguments)
    states = run_rule(rule, np.isfinite(magnitudes), magnitudes)
    assert states.loss_scale.tolist() == scales


def test_shorter_interval_than_the_tracker_grows_at_once():
    """PyTorch compares with ``==`` and would not grow before the next overflow."""
    state = ls.DynamicLossScale().init()._replace(growth_tracker=jnp.int32(1500))
    state = ls.DynamicLossScale(growth_interval=100).update(state, True)
    assert (float(state.loss_scale), int(state.growth_tracker)) == (2.0**16, 0)


def test_restored_state_is_brought_within_the_limits_first():
    state = ls.LossScaleState.create(2.0**30, hysteresis=5)
    assert ls.DynamicLossScale().update(state, False).loss_scale == 2.0**23


SMALLEST, LARGEST = 2.0**-126, 2.0**126
DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("headroom", [0.0, 3.0, 6.3])
@pytest.mark.parametrize("dtype", slow_but(("float16",), DTYPES))
def test_headroom_rule_takes_the_largest_power_of_two_within_the_bound(dtype, headroom):
    """For magnitudes right around the largest that each scale leaves below it."""
    limits = {"dtype": dtype, "min_scale": SMALLEST, "max_scale": LARGEST}
    rule = ls.HeadroomLossScale(headroom=headroom, **limits)
    top = float(jnp.finfo(dtype).max) / 2.0**headroom
    at = [x for k in range(-126, 127, 3) if SMALLEST < (x := top * 2.0**-k) < 2.0**127]
    bits = np.float32(at).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    magnitudes = bits.ravel().view(np.float32)
    states = jax.jit(jax.vmap(lambda m: rule.update(rule.init(), True, m)))(magnitudes)
    scale = np.float64(states.loss_scale)
    scaled = magnitudes * scale  # exact: a float32 times a power of two
    bound = top * (1 + 2.0**-23)  # a float32
    assert np.all((scaled <= bound) | (scale == SMALLEST))
    assert np.all((2 * scaled > top) | (scale == LARGEST))


MEASURING = ls.HeadroomLossScale(half_life=1)


def test_headroom_rule_raises_a_lowered_scale_by_an_octave_in_each_half_life():
    """Retries lower it, and so does a rule with more headroom: it is not forgotten."""
    state = MEASURING.update(MEASURING.init(), True, 1.0)._replace(loss_scale=2.0**9)
    scales = []
    for _ in range(5):
        state = MEASURING.update(state, True, 1.0)
        scales.append(state.loss_scale)
    assert scales == [2.0**10, 2.0**11, 2.0**12, 2.0**12, 2.0**12]


def test_headroom_rule_lowers_a_raised_scale_to_what_it_remembers():
    """2**12 for 1.0, and an octave more after a half-life without a gradient."""
    state = MEASURING.update(MEASURING.init(), True, 1.0)._replace(loss_scale=2.0**18)
    assert MEASURING.update(state, True, 0.0).loss_scale == 2.0**13


def test_headroom_rule_backs_off_from_a_scale_for_gradients_beyond_float32():
    rule = ls.HeadroomLossScale(min_scale=SMALLEST, backoff_factor=0.25)
    state = rule.init()._replace(loss_scale=jnp.float32(2.0**-120))
    assert float(rule.update(state, False, 0.0).loss_scale) == 2.0**-122
