"""scale_loss and unscale_grads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, enable_x64

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**12).init()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float8_e5m2", "float32")]
    + [(t, t) for t in ("float32", "float64", "complex64", "complex128")],
)
def test_gradients_come_back_in_float32_or_wider(dtype, expected):
    with enable_x64(True):
        grads = {"w": jnp.asarray([2.0, -0.5], dtype), "none": None}
        unscaled = ls.unscale_grads(grads, STATE)
        assert unscaled["none"] is None and unscaled["w"].dtype == jnp.dtype(expected)
        np.testing.assert_array_equal(unscaled["w"], [2.0**-11, -(2.0**-13)])


def test_infinite_parts_of_complex_gradients_stay_what_they_are():
    grads = jnp.array([complex(np.inf, 1.0), complex(0.0, -np.inf)], jnp.complex64)
    real, imag = ls.unscale_grads(grads, STATE), ls.unscale_grads(grads, STATE).imag
    np.testing.assert_array_equal(real.real, [np.inf, 0.0])
    np.testing.assert_array_equal(imag, [2.0**-12, -np.inf])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scale_loss_is_float32_or_wider(dtype):
    scaled = ls.scale_loss(jnp.asarray([1.5, 3.0], dtype), STATE)
    assert scaled.dtype == jnp.float32
    np.testing.assert_array_equal(scaled, [1.5 * 2**12, 3.0 * 2**12])
    with enable_x64(True):
        assert ls.scale_loss(jnp.float64(1), STATE).dtype == jnp.float64


def test_unscale_undoes_scale_exactly_for_powers_of_two():
    x = jax.random.normal(jax.random.key(0), (1000,))
    assert_same_bits(ls.unscale_grads(ls.scale_loss(x, STATE), STATE), x)


def test_integer_leaves_pass_through_unscale():
    grads = {"i": jnp.int32(4), "f0": np.zeros(2, jax.dtypes.float0)}
    assert_same_bits(ls.unscale_grads(grads, STATE), grads)
