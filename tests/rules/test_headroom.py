"""HeadroomLossScale: the headroom is kept, at once, and no more than that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import slow_but
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


def test_the_headroom_rule_follows_at_once_and_forgets_slowly():
    rule = ls.HeadroomLossScale(half_life=100, headroom=4, max_scale=2.0**40)
    magnitudes = [0.99 * 2.0**-20, 0.99 * 2.0**-10, *[2.0**-20] * 100]
    scales = run_rule(rule, [True] * 102, magnitudes).loss_scale
    assert scales[0] == 2.0**32
    assert set(scales[1:100]) == {2.0**22}
    assert scales[101] == 2.0**23


def test_an_overflow_of_what_the_headroom_rule_cannot_see_is_remembered():
    rule = ls.HeadroomLossScale(half_life=100)
    flags = np.arange(212) != 1
    scales = run_rule(rule, flags, [2.0**-10] * 212).loss_scale
    assert set(scales[1:92]) == {scales[0] / 4}
    assert scales[211] == scales[0]


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
