"""HeadroomLossScale: the headroom is kept, at once, and no more than that."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import slow_but
from simulated_rules import Simulated
from training import run_rule

import optax_lossscale as ls

SMALLEST, LARGEST = 2.0**-126, 2.0**126


DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


def around(top):
    """Magnitudes right around the largest that each scale leaves below a bound."""
    at = [top * 2.0**-k for k in range(-126, 127, 3)]
    at = np.float32([x for x in at if SMALLEST < x < 2.0**127])
    near = [at]
    for end in np.float32([0, np.inf]):
        near += [once := np.nextafter(at, end), np.nextafter(once, end)]
    return np.concatenate(near)


@pytest.mark.parametrize("dtype", slow_but(("float16",), DTYPES))
def test_the_bound_holds_to_the_last_bit_and_no_scale_is_given_away(dtype):
    headrooms = [0.0, 3.0, 10.0, 0.5, 6.3]
    limits = {"dtype": dtype, "min_scale": SMALLEST, "max_scale": LARGEST}
    tops = [float(jnp.finfo(dtype).max) / 2.0**x for x in headrooms]
    magnitudes = [around(top) for top in tops]
    for headroom, top, m in zip(headrooms, tops, magnitudes, strict=True):
        rule = ls.HeadroomLossScale(headroom=headroom, **limits)
        state = jax.vmap(lambda m, r=rule: r.update(r.init(), True, m))(m)
        # Exact: a power of two times a float32.
        m, scale = np.float64(m), np.float64(state.loss_scale)
        bound = top * (1 + 2.0**-23)  # a float32
        assert np.all((scale * m <= bound) | (scale == SMALLEST)), headroom
        assert np.all((2 * scale * m > top) | (scale == LARGEST)), headroom


@pytest.mark.parametrize("half_life", [1, 30])
def test_the_rule_does_as_documented(half_life):
    """It follows at once, forgets slowly, and remembers an overflow."""
    rule = ls.HeadroomLossScale(half_life=half_life, headroom=4, max_scale=2.0**40)
    rng = np.random.default_rng(0)
    flags, magnitudes = rng.random(250) > 0.05, 2.0 ** rng.uniform(-30, -5, 250)
    magnitudes[100:200] /= 2.0**10
    states, simulated = run_rule(rule, flags, magnitudes), Simulated(rule)
    for step, (finite, largest) in enumerate(zip(flags, magnitudes, strict=True)):
        simulated.update(finite, np.float32(largest))
        simulated.assert_is(jax.tree.map(operator.itemgetter(step), states))


@pytest.mark.parametrize(
    ("headroom", "factor", "dtype"),
    [(0.0, 0.5, "float16"), (2.7, 0.25, "bfloat16"), (0.0, 0.125, "float8_e4m3fn")],
)
def test_an_overflow_lowers_the_headroom_scale_by_its_factor_and_no_more(
    headroom, factor, dtype
):
    rule = ls.HeadroomLossScale(
        headroom=headroom,
        dtype=dtype,
        backoff_factor=factor,
        min_scale=2.0**-30,
        max_scale=2.0**70,
    )
    # Below 2**6, what would overflow bfloat16 is no float32.
    start = jnp.asarray(2.0 ** np.arange(6, 60), jnp.float32)
    state = jax.vmap(lambda s: rule.init()._replace(loss_scale=s))(start)
    for flag, magnitude in ((False, jnp.inf), (True, 2.0**-126)):
        state = jax.vmap(lambda s, x=(flag, magnitude): rule.update(s, *x))(state)
        np.testing.assert_array_equal(state.loss_scale, factor * start)
