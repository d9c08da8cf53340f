"""Gradients by the functions of other libraries that differentiate."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax import nnx
from nnx_model import Net
from training import normal

import optax_lossscale as ls

X = normal(16, 8)
Y = np.float32(X[:, :1] > 0)
TX = ls.with_loss_scaling(optax.adamw(3e-2), ls.DynamicLossScale(2.0**10))


def cross_entropy(logits):
    return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), Y).mean()


@pytest.mark.parametrize(
    "way",
    [
        functools.partial(ls.value_and_grad, value_and_grad=nnx.value_and_grad),
        lambda fun, state: nnx.value_and_grad(ls.scale_backward(fun, state)),
    ],
    ids=["value_and_grad", "scale_backward"],
)
def test_nnx_modules_change_and_have_the_gradients_of_nnx(way):
    def loss_fn(model, x):
        return cross_entropy(model(x))

    ours, theirs = Net(), Net()
    optimizer = nnx.Optimizer(ours, TX, wrt=nnx.Param)

    @nnx.jit
    def both(ours, optimizer, theirs, x):
        return way(loss_fn, optimizer)(ours, x), nnx.value_and_grad(loss_fn)(theirs, x)

    (loss, grads), (their_loss, their_grads) = both(ours, optimizer, theirs, X)
    np.testing.assert_array_equal(loss, their_loss)
    chex.assert_trees_all_close(grads, their_grads, rtol=2e-2, atol=1e-4)
    kinds = (nnx.BatchStat, nnx.RngState)
    assert_same_bits(nnx.state(ours, kinds), nnx.state(theirs, kinds))


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    activation: callable


@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_an_equinox_module_may_hold_functions_and_return_them(make):
    def loss_fn(model, x):
        outputs = model.activation(jax.vmap(model.linear)(x))
        return cross_entropy(outputs), model.activation

    @eqx.filter_jit
    def both(model, state):
        options = {"has_aux": True, "value_and_grad": eqx.filter_value_and_grad}
        theirs = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, X)
        return make(loss_fn, state, **options)(model, X), theirs

    model = Layer(eqx.nn.Linear(8, 1, key=jax.random.key(0)), jax.nn.tanh)
    ours, expected = both(model, ls.DynamicLossScale().init())
    (loss, activation), grads, *_ = ours
    assert activation is jax.nn.tanh and grads.activation is None
    chex.assert_trees_all_close((loss, grads), (expected[0][0], expected[1]), rtol=1e-5)
