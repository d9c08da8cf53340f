"""`scale_backward` at a given scale: `value_and_grad`, by any differentiator."""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from training import normal

import optax_lossscale as ls

X = normal(16, 8)
PARAMS = {"w": normal(8, 4), "b": np.zeros(4, np.float32)}
TX = ls.with_loss_scaling(optax.adamw(3e-2))
STATE = TX.init(PARAMS)


def loss_fn(params, x):
    """Its gradients are 0 without a scale, and inf at 2**24."""
    params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
    y = jnp.tanh(x @ params["w"] + params["b"])
    return 2.0**-20 * jnp.mean(y.astype(jnp.float32) ** 2)


READS = [lambda state: state, ls.get_loss_scale, lambda state: 2.0**15]
READS += [lambda state: np.array(2.0**15)]  # as `jax.device_get` returns it


@pytest.mark.parametrize("read", READS)
def test_gradients_are_those_of_value_and_grad(read):
    @jax.jit
    def both(params, state):
        ours = jax.value_and_grad(ls.scale_backward(loss_fn, scale=read(state)))
        return ours(params, X), ls.value_and_grad(loss_fn, state)(params, X)

    found, expected = both(PARAMS, STATE)
    assert all(np.any(g) for g in jax.tree.leaves(found[1]))
    assert_same_bits(found, expected)


def test_it_has_no_derivatives_in_forward_mode():
    """A tangent divided by the scale on entering would underflow in float16."""
    cube = ls.scale_backward(lambda x: x**3, 2.0**10)
    with pytest.raises(TypeError, match="forward-mode .*custom_vjp"):
        jax.jvp(cube, (2.0,), (1.0,))


def test_a_float16_gradient_of_a_parameter_is_warned_of():
    w = np.ones(8, np.float16)
    scaled = ls.scale_backward(lambda w, x: jnp.float32(w @ x), scale=2.0**10)
    with pytest.warns(UserWarning, match=r"takes an array of dtype float16") as warned:
        assert jax.grad(scaled)(w, w).dtype == jnp.float16
    assert warned[0].filename == __file__
    scaled(w, w)  # warnings are errors
    jax.grad(scaled)(w.astype(np.float32), w)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.0, "`scale` must be a number from 2"),
        (np.ones(2), "`scale` must be a number from 2"),
        (TX, "pass what its `init"),
    ],
)
def test_what_is_no_scale_is_refused(scale, message):
    with pytest.raises(ValueError, match=message):
        ls.scale_backward(loss_fn, scale=scale)(PARAMS, X)


def test_without_a_scale_the_error_names_scale_block():
    with pytest.raises(TypeError, match="`scale` must be .* use `scale_block`"):
        ls.scale_backward(loss_fn)


def test_host_effects_are_refused_but_debugging_is_kept():
    def fun(w, callback, *options):
        callback(seen.append, *options, w[0])
        return jnp.sum(w)

    seen, w = [], np.ones(2, np.float32)
    scaled = ls.scale_backward(fun, 2.0)
    with pytest.raises(TypeError, match=r"`fun` must be free of effects .*'IOEffect'"):
        scaled(w, jax.experimental.io_callback, None)
    jax.grad(scaled)(w, jax.debug.callback)
    jax.effects_barrier()
    assert seen == [1.0]
