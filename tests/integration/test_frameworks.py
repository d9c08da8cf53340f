"""Ways to use frameworks that no page shows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_no_update, assert_same_bits

import optax_lossscale as ls


def test_a_gan_has_two_optimizers_and_skips_one_of_them():
    tx = ls.with_loss_scaling(optax.adam(0.1))

    def score(d, x):
        return jnp.mean((jnp.float16(x) * jnp.float16(d)).astype(jnp.float32))

    def generator_loss(g, d, z):
        return -score(d, z * g)

    def discriminator_loss(d, g, z, x):
        return score(d, z * g) - score(d, x)

    def step(loss_fn, player, *others):
        state = tx.init(player)
        _, grads = ls.value_and_grad(loss_fn, state)(player, *others)
        updates, state = tx.update(grads, state, player)
        return updates, float(ls.get_loss_scale(state))

    g, d, z = jnp.ones(3), jnp.ones(3), jnp.full((4, 3), 0.25)
    real = z.at[0, 0].set(1e6)  # reaches the discriminator alone
    updates, scale = step(discriminator_loss, d, g, z, real)
    assert_no_update(updates)
    assert scale == 2.0**14
    updates, scale = step(generator_loss, g, d, z)
    assert updates.all() and scale == 2.0**15


class Noisy(nnx.Module):
    def __init__(self, rate=0.5):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x):
        x = self.linear(self.norm(x))
        return self.dropout(x) if self.dropout else x


X = jnp.arange(6.0).reshape(2, 3)
TX = ls.with_loss_scaling(optax.sgd(0.1))


def test_statistics_of_nnx_change_in_place_and_dropout_can_be_kept():
    kinds = (nnx.BatchStat, nnx.RngState)
    model = Noisy()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return ls.scale_loss(jnp.mean(model(x) ** 2), optimizer)

        old = jax.tree.map(jnp.copy, nnx.state(model, kinds))
        grads = nnx.grad(loss_fn)(model)
        optimizer.update(model, ls.unscale_grads(grads, optimizer))
        nnx.update(model, ls.keep_if_applied(optimizer, nnx.state(model, kinds), old))

    def copied():
        return jax.tree.map(jnp.copy, nnx.state(model, (*kinds, nnx.Param)))

    before = copied()
    step(model, optimizer, X)
    after = copied()
    assert not np.array_equal(after.norm.mean[...], before.norm.mean[...])
    assert int(model.dropout.rngs.count[...]) == 1
    step(model, optimizer, X.at[0, 0].set(jnp.nan))
    assert_same_bits(copied(), after)
    assert int(ls.applied_steps(optimizer, optimizer.step)) == 1


@pytest.mark.slow
def test_a_float16_equinox_model_is_the_rounded_master_weights():
    def half(tree):
        return jax.tree.map(lambda p: p.astype(jnp.float16), tree)

    tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(1e-2)))
    model = eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    params = half(params)

    def loss_fn(params):
        out = jax.vmap(eqx.combine(params, static))(jnp.ones((4, 8), jnp.float16))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    @jax.jit
    def step(params, state):
        loss, grads = ls.value_and_grad(loss_fn, state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(5):
        params, state, loss = step(params, state)
        losses.append(loss)
    assert losses[-1] < losses[0]
    assert_same_bits(params, half(optax.tree.get(state, "master_weights")))
