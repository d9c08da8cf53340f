"""Gradients by the functions of other libraries that differentiate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, assert_same_bits
from nnx_model import Net

import optax_lossscale as ls

X = jax.random.normal(jax.random.key(0), (16, 8))
Y = (X[:, :1] > 0).astype(jnp.float32)
RULE = ls.DynamicLossScale(init_scale=2.0**10)
TX = ls.with_loss_scaling(optax.adamw(3e-2), RULE)


def cross_entropy(logits):
    return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), Y).mean()


@pytest.mark.parametrize("argnums", [0, nnx.DiffState(0, nnx.Param)])
def test_nnx_modules_change_in_place_and_have_the_gradients_of_nnx(argnums):
    def loss_fn(model, x):
        return cross_entropy(model(x))

    ours, theirs = Net(), Net()
    optimizer = nnx.Optimizer(ours, TX, wrt=nnx.Param)

    @nnx.jit
    def both(ours, optimizer, theirs, x):
        options = {"argnums": argnums, "value_and_grad": nnx.value_and_grad}
        their_fun = nnx.value_and_grad(loss_fn, argnums=argnums)
        return (
            ls.value_and_grad(loss_fn, optimizer, **options)(ours, x),
            their_fun(theirs, x),
        )

    (loss, grads), (their_loss, their_grads) = both(ours, optimizer, theirs, X)
    np.testing.assert_array_equal(loss, their_loss)
    assert_close(grads, their_grads, rtol=2e-2, atol=1e-4)
    kinds = (nnx.BatchStat, nnx.RngState)
    assert_same_bits(nnx.state(ours, kinds), nnx.state(theirs, kinds))


class Mlp(eqx.Module):
    layers: list
    activation: callable
    scale: float = eqx.field(static=True)

    def __call__(self, x):
        params, static = eqx.partition(self.layers, eqx.is_inexact_array)
        params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        first, last = eqx.combine(params, static)
        x = self.activation(jax.vmap(first)(x.astype(jnp.float16)))
        return self.scale * jax.vmap(last)(x)


@pytest.mark.parametrize("retries", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_equinox_module_may_hold_functions_and_return_them(retries):
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(8, 16, key=keys[0]), eqx.nn.Linear(16, 1, key=keys[1])]
    model = Mlp(layers, jax.nn.relu, 1.0)
    options = {"has_aux": True, "value_and_grad": eqx.filter_value_and_grad}
    differentiate = ls.value_and_grad_with_retries if retries else ls.value_and_grad

    def loss_fn(model, x):
        return cross_entropy(model(x)), model.activation

    @eqx.filter_jit
    def step(model, opt_state, x):
        fun = differentiate(loss_fn, opt_state, **options)
        (loss, activation), grads, *states = fun(model, x)
        assert activation is jax.nn.relu and grads.activation is None
        params = eqx.filter(model, eqx.is_inexact_array)
        (opt_state,) = states or [opt_state]
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state, losses = TX.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(20):
        model, opt_state, loss = step(model, opt_state, X)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    skipped, opt_state, _ = step(model, opt_state, X.at[3, 2].set(jnp.nan))
    assert not ls.was_applied(opt_state) and eqx.tree_equal(skipped, model)


def test_arguments_at_their_defaults_are_not_passed_on():
    seen = []

    def differentiate(fun, **options):
        seen.append(options)
        return jax.value_and_grad(fun, **options)

    for options, gradient in (({}, 3.0), ({"argnums": 1}, 2.0)):
        options = {**options, "value_and_grad": differentiate}
        assert ls.grad(lambda x, y: x * y, RULE.init(), **options)(2.0, 3.0) == gradient
    assert seen == [{"has_aux": True}, {"has_aux": True, "argnums": 1}]
