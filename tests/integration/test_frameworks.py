"""Ways to use frameworks that no page shows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits

import optax_lossscale as ls


def test_a_gan_has_two_optimizers_and_skips_one_of_them():
    def generator(params, z):
        return z.astype(jnp.float16) * params["g"].astype(jnp.float16)

    def score(params, x):
        return (x * params["d"].astype(jnp.float16)).astype(jnp.float32).mean()

    def generator_loss(g_params, d_params, z):
        return -score(d_params, generator(g_params, z))

    def discriminator_loss(d_params, g_params, x, z):
        fake = generator(g_params, z)
        return score(d_params, fake) - score(d_params, x.astype(jnp.float16))

    tx = ls.with_loss_scaling(optax.adam(0.1))
    players = {"g": {"g": jnp.ones(3)}, "d": {"d": jnp.ones(3)}}
    states = {name: tx.init(params) for name, params in players.items()}

    @jax.jit
    def step(players, states, x, z):
        g, d = players["g"], players["d"]
        _, g_grads = ls.value_and_grad(generator_loss, states["g"])(g, d, z)
        _, d_grads = ls.value_and_grad(discriminator_loss, states["d"])(d, g, x, z)
        new_players, new_states = {}, {}
        for name, grads in (("g", g_grads), ("d", d_grads)):
            updates, new_states[name] = tx.update(grads, states[name], players[name])
            new_players[name] = optax.apply_updates(players[name], updates)
        return new_players, new_states

    x, z = jnp.full((4, 3), 0.5), jnp.full((4, 3), 0.25)
    players, states = step(players, states, x, z)
    # Real data reach the discriminator alone.
    new_players, new_states = step(players, states, x.at[0, 0].set(1e6), z)
    assert_same_bits(new_players["d"], players["d"])
    assert_same_bits(new_states["d"].inner_state, states["d"].inner_state)
    assert float(ls.get_loss_scale(new_states["d"])) == 2.0**14
    assert not np.array_equal(new_players["g"]["g"], players["g"]["g"])
    assert float(ls.get_loss_scale(new_states["g"])) == 2.0**15
    with pytest.raises(ValueError, match="only one LossScaleState, got 2"):
        ls.value_and_grad(generator_loss, new_states)


class Noisy(nnx.Module):
    def __init__(self, rate):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x):
        x = self.linear(self.norm(x))
        return self.dropout(x) if self.dropout else x


def test_statistics_of_nnx_change_in_place_and_dropout_can_be_kept():
    kinds = (nnx.BatchStat, nnx.RngState)
    model = Noisy(0.5)
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return ls.scale_loss(jnp.mean(model(x) ** 2), optimizer)

        old = jax.tree.map(jnp.copy, nnx.state(model, kinds))
        grads = nnx.grad(loss_fn)(model)
        optimizer.update(model, ls.unscale_grads(grads, optimizer))
        nnx.update(model, ls.keep_if_applied(optimizer, nnx.state(model, kinds), old))

    x = jnp.arange(6.0).reshape(2, 3)
    shared = nnx.state(model, nnx.BatchStat)
    copied = jax.tree.map(jnp.copy, shared)
    step(model, optimizer, x)
    after = jax.tree.map(jnp.copy, nnx.state(model, (*kinds, nnx.Param)))
    assert_same_bits(shared, nnx.state(model, nnx.BatchStat))
    assert not np.array_equal(*map(jax.tree.leaves, (shared, copied)))
    assert int(model.dropout.rngs.count[...]) == 1
    step(model, optimizer, x.at[0, 0].set(jnp.nan))
    assert_same_bits(nnx.state(model, (*kinds, nnx.Param)), after)
    assert int(ls.applied_steps(optimizer, optimizer.step)) == 1


def test_jaxs_differentiator_leaves_the_statistics_of_nnx_as_they_were():
    model = Noisy(None)
    optimizer = nnx.Optimizer(
        model, ls.with_loss_scaling(optax.sgd(0.1)), wrt=nnx.Param
    )
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
    x = jnp.arange(6.0).reshape(2, 3)
    grads = ls.grad(lambda model: jnp.mean(model(x) ** 2), optimizer)(model)
    assert np.any(grads.linear.kernel)
    assert_same_bits(nnx.state(model, nnx.BatchStat), before)
    with pytest.raises(TypeError, match="uint32"):
        ls.grad(lambda model: jnp.mean(model(x) ** 2), optimizer)(Noisy(0.5))
    model(x)
    assert not np.array_equal(
        *map(jax.tree.leaves, (nnx.state(model, nnx.BatchStat), before))
    )


@pytest.mark.slow
def test_float16_models_follow_their_master_weights():
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(1e-2)))
    x = jnp.ones((4, 8), jnp.float16)

    def loss_of(model):
        return jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)

    def half(tree):
        return jax.tree.map(lambda p: p.astype(jnp.float16), tree)

    mlp = eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    params = half(params)
    state = tx.init(params)
    first = loss_of(eqx.combine(params, static))

    @jax.jit
    def step(params, state):
        grads = ls.grad(lambda p: loss_of(eqx.combine(p, static)), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(5):
        params, state = step(params, state)
    assert loss_of(eqx.combine(params, static)) < first
    assert_same_bits(params, half(optax.tree.get(state, "master_weights")))

    model = nnx.Linear(8, 1, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    first = loss_of(model)

    @nnx.jit
    def nnx_step(model, optimizer):
        grads = nnx.grad(lambda m: ls.scale_loss(loss_of(m), optimizer))(model)
        optimizer.update(model, ls.unscale_grads(grads, optimizer))

    for _ in range(5):
        nnx_step(model, optimizer)
    assert loss_of(model) < first
    masters = jax.tree.leaves(optimizer.opt_state.inner_state.master_weights)
    assert_same_bits(jax.tree.leaves(nnx.state(model)), half(masters))
