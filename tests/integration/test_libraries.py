"""Modules of Flax NNX and Equinox, in every way that scales a loss or a block."""

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
from training import normal

import optax_lossscale as ls

X, STATE = normal(16, 8), ls.DynamicLossScale(2.0**20).init()


class Changing(nnx.Module):
    """Its statistics and the counter of its keys change while it is called."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        # A bias before the norm has gradients that are rounding errors.
        self.hidden = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(jnp.tanh(self.hidden(x)))))


class Holding(eqx.Module):
    """It holds a function."""

    linear: eqx.nn.Linear
    activation: callable

    def __call__(self, x):
        return self.activation(jax.vmap(self.linear)(x))

    block = ls.scale_block(__call__)


@functools.cache
@nnx.jit
def changing():
    return Changing()


@functools.cache
@nnx.jit
def unchanged():
    return nnx.Linear(8, 1, rngs=nnx.Rngs(0))


@functools.cache
@eqx.filter_jit
def holding():
    return Holding(eqx.nn.Linear(8, 1, key=jax.random.key(0)), jax.nn.tanh)


NORM = "NNX, BatchNorm and dropout"
# How it is made, compiled and differentiated.
MODULES = {
    NORM: (lambda: nnx.clone(changing()), nnx.jit, nnx.value_and_grad),
    "NNX, linear": (unchanged, nnx.jit, nnx.value_and_grad),
    "Equinox": (holding, eqx.filter_jit, eqx.filter_value_and_grad),
}


def loss_of(y):
    return 2.0**-40 * jnp.sum(jnp.square(y))


def loss_fn(model):
    return loss_of(model(X))


def loss_of_block(model):
    return loss_of(ls.scale_block(type(model).__call__)(model, X))


def loss_of_block_closed_over(model):
    return loss_of(ls.scale_block(model.__call__)(X))


def loss_of_method(model):
    return loss_of(model.block(X))


RETRIES = ls.value_and_grad_with_retries
# Functions of the library's `value_and_grad`.
WAYS = {
    "value_and_grad": lambda d: ls.value_and_grad(loss_fn, STATE, value_and_grad=d),
    "retries": lambda d: RETRIES(loss_fn, STATE, value_and_grad=d),
    "scale_backward": lambda d: d(ls.scale_backward(loss_fn, STATE)),
    # In the loss, only the call of the module is scaled.
    "block": lambda d: d(loss_of_block),
    "block, closed over": lambda d: d(loss_of_block_closed_over),
    "block, method": lambda d: d(loss_of_method),
}
CHANGING = [(way, NORM) for way in ("value_and_grad", "scale_backward", "block")]
CELLS = [
    *CHANGING,
    ("block, closed over", "NNX, linear"),
    *((way, "Equinox") for way in WAYS),
]


def unscaled(differentiate):
    return differentiate(loss_fn)


@functools.cache
def ran(way, module):
    """The loss, the gradients, and the module that has been called."""
    make, jit, differentiate = MODULES[module]
    model, fun = make(), way(differentiate)
    loss, grads, *_ = jit(lambda model: fun(model))(model)
    return loss, grads, model


@pytest.mark.parametrize(("way", "module"), CELLS)
def test_scaled_module_has_the_gradients_of_its_library(way, module):
    loss, grads, _ = ran(WAYS[way], module)
    expected, their_grads, _ = ran(unscaled, module)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, their_grads, rtol=1e-5, atol=2.0**-50)
    assert all(np.any(x) for x in jax.tree.leaves(their_grads))


@pytest.mark.parametrize(("way", "module"), CHANGING)
def test_scaled_module_changes_as_in_its_library(way, module):
    *_, ours = ran(WAYS[way], module)
    *_, theirs = ran(unscaled, module)
    kinds = nnx.BatchStat, nnx.RngState
    assert_same_bits(nnx.state(ours, kinds), nnx.state(theirs, kinds))
    assert np.all(ours.norm.mean[...] != 0)


@pytest.mark.parametrize("make", [ls.value_and_grad, RETRIES])
def test_loss_of_an_equinox_module_may_return_a_function(make):
    fun = make(
        lambda model: (loss_fn(model), model.activation),
        STATE,
        has_aux=True,
        value_and_grad=eqx.filter_value_and_grad,
    )
    (_, activation), grads, *_ = eqx.filter_jit(fun)(holding())
    assert activation is jax.nn.tanh and grads.activation is None


class Adapted(nnx.Module):
    def __init__(self):
        self.hidden = nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.hidden(jnp.tanh(x))


def test_adapters_of_lora_are_trained_alone():
    @nnx.jit
    def step(model, optimizer):
        fun = ls.value_and_grad(
            lambda model: jnp.sum(jnp.square(model(X) - 1)),
            optimizer,
            argnums=nnx.DiffState(0, nnx.LoRAParam),
            value_and_grad=nnx.value_and_grad,
        )
        loss, grads = fun(model)
        optimizer.update(model, grads, value=loss)
        return loss

    model, tx = nnx.jit(Adapted)(), ls.with_loss_scaling(optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    losses = [step(model, optimizer) for _ in range(3)]
    after = nnx.state(model)
    for path, x in nnx.to_flat_state(after):
        moved = not np.array_equal(x[...], dict(nnx.to_flat_state(before))[path][...])
        assert moved == ("lora" in path[-1])
    assert losses[-1] < losses[0] and ls.was_applied(optimizer)


@pytest.mark.parametrize("differentiate", [jax.value_and_grad, nnx.value_and_grad])
def test_state_of_nnx_may_be_an_argument(differentiate):
    graphdef, params = nnx.split(unchanged())

    @jax.jit
    def gradients(params):
        fun = ls.value_and_grad(
            lambda params: loss_fn(nnx.merge(graphdef, params)),
            STATE,
            value_and_grad=differentiate,
        )
        return fun(params)

    loss, grads = gradients(params)
    expected, their_grads, _ = ran(unscaled, "NNX, linear")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, their_grads, rtol=1e-5, atol=2.0**-50)
