"""scale_block around the modules of other libraries."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from training import normal

import optax_lossscale as ls

X = normal(4, 3)
at_given_scale = functools.partial(ls.scale_backward, scale=2.0**30)


def assert_same_gradients(call, compiled, differentiate, model):
    """Of ``call(wrap, model)``, with and without a scale around its block."""

    def leaves(wrap):
        grad = differentiate(lambda m: 2.0**-40 * jnp.sum(call(wrap, m) ** 2))
        return jax.tree.leaves(jax.device_get(compiled(grad)(model)))

    plain = leaves(lambda fun: fun)
    assert len(plain) > 0
    for wrap in (ls.scale_block, at_given_scale):
        for a, e in zip(leaves(wrap), plain, strict=True):
            assert np.abs(e).max() > 0
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6 * np.abs(e).max())


class Block(eqx.Module):
    linear: eqx.nn.Linear
    activation: callable

    def plain(self, x):
        return self.activation(self.linear(x))

    __call__ = ls.scale_block(plain)


def test_equinox_modules_and_their_methods():
    def call(wrap, model):
        return model(X[0]) if wrap is ls.scale_block else wrap(Block.plain)(model, X[0])

    block = Block(eqx.nn.Linear(3, 3, key=jax.random.key(1)), jax.nn.tanh)
    assert_same_gradients(call, eqx.filter_jit, eqx.filter_grad, block)


class NnxBlock(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        # A bias before the norm has gradients that are rounding errors.
        self.linear = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def plain(self, x):
        return jnp.tanh(self.norm(self.linear(x)))


def test_nnx_modules_that_change_are_arguments():
    def call(wrap, model):
        return wrap(NnxBlock.plain)(model, X)

    module = NnxBlock()
    assert_same_gradients(call, nnx.jit, nnx.grad, module)
    assert np.all(np.asarray(module.norm.mean[...]) != 0)


def test_nnx_modules_that_do_not_change_may_be_closed_over():
    def call(wrap, model):
        return wrap(model.__call__)(X)

    module = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    assert_same_gradients(call, nnx.jit, nnx.grad, module)
