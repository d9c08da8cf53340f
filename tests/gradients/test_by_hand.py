"""scale_loss and unscale_grads, and the types of all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from shared import enable_x64

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**12).init()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(t, "float32") for t in ("float16", "float8_e5m2", "float8_e4m3fn")]
    + [(t, t) for t in ("bfloat16", "float32", "float64", "complex64", "complex128")],
)
def test_gradients_have_the_type_of_the_parameter_or_float32(dtype, expected):
    def loss_fn(w):
        return jnp.sum(jnp.abs(w.astype(expected))) * 2.0**-11

    @jax.jit
    def results(w, scaled):
        makes = ls.value_and_grad, ls.value_and_grad_with_retries
        both = [make(loss_fn, STATE)(w)[1] for make in makes]
        return *both, ls.unscale_grads(scaled, STATE), ls.grad(loss_fn, STATE)(w)

    def array(numbers, dtype):
        return np.array(numbers).astype(jnp.dtype(dtype))

    with enable_x64(True):
        signs = array([2.0**-11, -(2.0**-11)], expected)
        for grads in results(array([2.0, -0.5], dtype), array([2.0, -2.0], dtype)):
            assert_same_bits(grads, signs)


unscale_grads = jax.jit(ls.unscale_grads)


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**15])
def test_gradients_are_divided_wide_and_rounded_once(scale):
    every = np.arange(2**16, dtype="uint16").view(jnp.bfloat16)
    state = ls.FixedLossScale(scale).init()
    with enable_x64(True), np.errstate(invalid="ignore"):
        for wide, narrow in (("float32", "bfloat16"), ("float64", "float64")):
            exact = every.astype(wide) * (1 / np.asarray(scale, wide))
            normal = ~(np.abs(exact) < 2.0**-125)  # XLA flushes smaller ones to zero
            grads = np.asarray(unscale_grads(every.astype(jnp.dtype(narrow)), state))
            expected = exact.astype(grads.dtype)[normal]
            np.testing.assert_array_equal(
                np.float64(grads[normal]), np.float64(expected)
            )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_scale_loss_is_exact_and_in_float32_or_wider(dtype):
    with enable_x64(True):
        losses = [np.array(1.5, dtype), {"value": np.array([3.0], dtype), "no": None}]
        wide = "float64" if dtype == "float64" else "float32"
        expected = jax.tree.map(lambda x: 2**12 * x.astype(wide), losses)
        assert_same_bits(jax.jit(ls.scale_loss)(losses, STATE), expected)


def test_scale_loss_refuses_an_integer():
    with pytest.raises(TypeError, match="must be a floating-point array"):
        ls.scale_loss(jnp.int32(1), STATE)


def test_leaves_that_are_no_numbers_pass_through_unscale():
    grads = {"i": jnp.int32(4), "f0": np.zeros(2, jax.dtypes.float0), "none": None}
    assert_same_bits(ls.unscale_grads(grads, STATE), grads)
