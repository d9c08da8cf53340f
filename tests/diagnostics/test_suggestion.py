"""suggest_loss_scale, beside NumPy and ml_dtypes."""

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


@given(st.lists(st.floats(-100, 100, width=32), min_size=1), st.sampled_from(KINDS))
def test_suggestion_is_the_largest_scale_within_headroom(exponents, kind):
    dtype, headroom = kind
    x = np.resize(np.exp2(np.array(exponents, np.float32)), 9).astype(np.float32)
    grads = {"w": x, "not counted": np.float32([0, np.nan, -np.inf])}
    limits = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    found = ls.suggest_loss_scale(grads, dtype=dtype, headroom=headroom, **limits)
    scale, rescued, lost, informative = host(found)
    assert math.frexp(scale)[0] == 0.5 and informative
    largest = math.log2(float(jnp.finfo(dtype).max)) - headroom
    if 2.0**-126 < scale < 2.0**126:
        assert -1 - 1e-4 < math.log2(x.max() * scale) - largest <= 1e-4
    before, after = (oracle(x, s, dtype)["underflow"] / 9 for s in (1.0, scale))
    expected = (max(before - after, 0), after)
    assert (rescued, lost) == pytest.approx(expected, abs=1e-6)


BATCHES = np.float32([1e-9, 1e-6]) * np.float32([[1.0], [1e3], [0.0]])
# Bounds; gradients; the scale, the shares of rescued and lost, and whether any counts.
SUGGESTED = [
    # Gradients that are all zero tell nothing; XLA takes the last for zero on CPU.
    *(({}, [x], (2.0**15, 0, 0, False)) for x in ([], 0.0, np.nan, np.inf, 1e-45)),
    ({"max_scale": 8.0}, [0.0], (8.0, 0, 0, False)),
    ({"min_scale": 2.0**20}, [0.0], (2.0**20, 0, 0, False)),
    ({}, [2e-38], (2.0**24, 0, 1, True)),
    ({}, [3e38], (2.0**-24, 0, 0, True)),
    ({"min_scale": 8.0, "max_scale": 8.0}, [1.0], (8.0, 0, 0, True)),
    ({}, [1e-9], (2.0**24, 1, 0, True)),
    ({"max_scale": 1.0}, [1e-9], (1.0, 0, 1, True)),
    ({}, [1e-9, np.inf, 0.0], (2.0**24, 1, 0, True)),
    # Several batches count together. A scale below 1 loses more.
    ({}, BATCHES, (2.0**22, 0.25, 0, True)),
    ({}, [2e-6, 1e8], (2.0**-14, 0, 0.5, True)),
]


@pytest.mark.parametrize(("bounds", "grads", "expected"), SUGGESTED)
def test_suggestion_has_a_scale_within_bounds_and_shares(bounds, grads, expected):
    grads = [{"w": np.float32(x)} for x in grads]
    suggested = ls.suggest_loss_scale(grads, **bounds)
    assert tuple(host(suggested)) == expected
    compiled = jax.jit(lambda x: ls.suggest_loss_scale(x, **bounds))(grads)
    assert host(compiled) == host(suggested)
    scale, *_ = expected
    for rule in (ls.DynamicLossScale, ls.HeadroomLossScale):
        limits = {"min_scale": min(scale, 1.0)} | bounds
        assert rule(suggested.loss_scale, **limits).init_scale == scale


def test_suggestion_shows_a_table():
    shown = repr(
        ls.suggest_loss_scale([np.float32([0.0, 2e-5, 2e-2, 1e-9, 2e-6, 2e-3])])
    )
    assert shown.startswith("loss_scale   262144.0\nrescued      0.2\nlost ")
