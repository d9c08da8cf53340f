"""scale_backward around the modules of other libraries."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ls

X = jax.random.normal(jax.random.key(0), (4, 3))
TINY = 2.0**-40


def assert_same_gradients(loss_fn, differentiate, model):
    """Of a loss that takes the model and what is put around its block."""
    ours, plain = (
        jax.tree.leaves(differentiate(lambda m, w=wrap: loss_fn(w, m))(model))
        for wrap in (ls.scale_backward, lambda f: f)
    )
    assert len(ours) == len(plain) > 0
    for a, e in zip(ours, plain, strict=True):
        assert np.abs(e).max() > 0
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6 * np.abs(e).max())


class Block(eqx.Module):
    linear: eqx.nn.Linear
    activation: callable
    gain: float
    name: str = eqx.field(static=True)

    def plain(self, x):
        return self.gain * self.activation(self.linear(x))

    __call__ = ls.scale_backward(plain)


def test_equinox_modules_and_their_methods():
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(1))
    block = Block(linear, jax.nn.tanh, 2.0, "block")

    def loss_of(call):
        return lambda wrap, m: TINY * jnp.sum(call(wrap, m)(X[0]) ** 2)

    for call in (
        lambda wrap, m: wrap(m.plain),
        lambda wrap, m: lambda x: wrap(lambda m, x: m.plain(x))(m, x),
        lambda wrap, m: m.plain if wrap is not ls.scale_backward else m,
    ):
        assert_same_gradients(loss_of(call), eqx.filter_grad, block)


class NnxBlock(nnx.Module):
    def __init__(self, rngs, normalized=False):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs) if normalized else None

    def plain(self, x):
        x = self.linear(x)
        return jnp.tanh(x if self.norm is None else self.norm(x))


NNX_CALLS = {
    "closed over": lambda wrap, m: wrap(m.plain)(X),
    "an argument": lambda wrap, m: wrap(lambda m, x: m.plain(x))(m, X),
}


@pytest.mark.parametrize("call", NNX_CALLS.values(), ids=NNX_CALLS)
def test_nnx_modules_that_do_not_change(call):
    def loss_fn(wrap, model):
        return TINY * jnp.sum(call(wrap, model) ** 2)

    assert_same_gradients(loss_fn, nnx.grad, NnxBlock(nnx.Rngs(0)))


@pytest.mark.parametrize("name", NNX_CALLS)
def test_nnx_modules_that_change_are_refused(name):
    message = {
        "closed over": "Cannot mutate",  # nnx itself says so
        "an argument": "`fun` must not change its arguments.*norm.mean",
    }[name]
    model = NnxBlock(nnx.Rngs(0), normalized=True)
    with pytest.raises(Exception, match=message):
        nnx.grad(lambda m: jnp.sum(NNX_CALLS[name](ls.scale_backward, m)))(model)


def test_linen_and_haiku_modules_are_functions_of_arrays_in_apply():
    linen = nn.Dense(3)
    haiku = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    for module in (linen, haiku):
        params = module.init(jax.random.key(1), X)
        assert_same_gradients(
            lambda wrap, p, m=module: TINY * jnp.sum(wrap(m.apply)(p, X) ** 2),
            jax.grad,
            params,
        )
