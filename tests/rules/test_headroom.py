"""HeadroomLossScale: the headroom is kept in every type, and no more than that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import slow_but

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
def test_scale_is_the_largest_power_of_two_within_the_bound(dtype):
    headrooms = [0.0, 3.0, 10.0, 0.5, 6.3]
    limits = {"dtype": dtype, "min_scale": SMALLEST, "max_scale": LARGEST}
    tops = [float(jnp.finfo(dtype).max) / 2.0**x for x in headrooms]
    magnitudes = [around(top) for top in tops]
    for headroom, top, m in zip(headrooms, tops, magnitudes, strict=True):
        rule = ls.HeadroomLossScale(headroom=headroom, **limits)
        state = jax.jit(jax.vmap(lambda m, r=rule: r.update(r.init(), True, m)))(m)
        # Exact: a power of two times a float32.
        m, scale = np.float64(m), np.float64(state.loss_scale)
        bound = top * (1 + 2.0**-23)  # a float32
        assert np.all((scale * m <= bound) | (scale == SMALLEST)), headroom
        assert np.all((2 * scale * m > top) | (scale == LARGEST)), headroom


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
