"""Under jit, one decision however the arrays are sharded."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from devices import (
    ADAM,
    BAD_X,
    PARAMS,
    RULE,
    TX,
    alone,
    assert_agree,
    like_params,
    loss_fn,
)
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, set_mesh
from shared import slow_but

import optax_lossscale as ls

# The axes of the mesh, and what shards the weights and the bias.
LAYOUTS = {
    "data-parallel": ({"data": 8}, P(), P()),
    "fully sharded": ({"data": 8}, P("data"), P()),
    "two axes": ({"data": 2, "model": 4}, P("data", "model"), P("model")),
}


def specs(tree):
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    "layout", slow_but(("data-parallel", "fully sharded"), LAYOUTS)
)
def test_mesh_equals_one_device(axis_type, layout):
    axes, w_spec, b_spec = LAYOUTS[layout]
    mesh = make_mesh(axis_type, **axes)
    shard = functools.partial(NamedSharding, mesh)
    shardings = {"w": shard(w_spec), "b": shard(b_spec)}
    with set_mesh(mesh):
        params = jax.device_put(jax.device_get(PARAMS), shardings)
        state_shardings = like_params(TX, shardings, shard(P()))
        state = jax.jit(TX.init, out_shardings=state_shardings)(params)

        def gathered_loss_fn(params, x):
            if axis_type == EXPLICIT:
                params = jax.sharding.reshard(params, P())
            return loss_fn(params, x)

        chex.clear_trace_counter()

        @functools.partial(
            jax.jit, donate_argnums=(0, 1), out_shardings=(shardings, state_shardings)
        )
        @chex.assert_max_traces(1)
        def step(params, state, x):
            _, grads = ls.value_and_grad(gathered_loss_fn, state)(params, x)
            updates, new_state = TX.update(grads, state, params)
            if axis_type == EXPLICIT:
                assert specs(new_state) == specs(state)
            return optax.apply_updates(params, updates), new_state

        first_state = jax.tree.map(lambda x: (x.sharding, x.aval), state)
        for x in BAD_X:
            params, state = step(params, state, jax.device_put(x, shard(P("data"))))
    assert jax.tree.map(lambda x: (x.sharding, x.aval), state) == first_state
    assert state.inner_state[0].mu["w"].sharding.spec == w_spec
    assert int(state.scale_state.skipped_steps) == 1
    assert_agree((params, state), alone(BAD_X))


@pytest.mark.parametrize("check_updates", slow_but((True,), (True, False)))
def test_state_takes_the_sharding_of_its_parameters(
    check_updates,
):
    """Of weakly typed parameters, optax makes such a state by itself."""
    mesh = make_mesh(EXPLICIT, x=8)
    tx = ls.with_loss_scaling(ADAM, RULE, check_updates=check_updates)
    with set_mesh(mesh):
        params = jnp.full((8, 2), 1.0)
        state = tx.init(params)
        params = jax.device_put(params, NamedSharding(mesh, P("x")))
        for factor in (1.0, np.inf, 1.0):
            grads = jax.device_put(np.full((8, 2), factor, np.float32), params.sharding)
            updates, state = jax.jit(tx.update)(grads, state, params)
            assert specs(updates) == specs(state.inner_state[0].mu) == P("x", None)
        kept = ls.keep_if_applied(state, params, np.zeros((8, 2), np.float32))
    assert specs(kept) == P("x", None)
    assert int(state.scale_state.skipped_steps) == 1


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_master_weights_may_be_sharded_alone(axis_type):
    """The layout of ZeRO's first stage."""
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(0.1)))
    params = np.linspace(-1, 1, 16).astype(np.float16)
    params[3] = 0
    grads, state = np.ones_like(params), tx.init(params)
    expected = jax.jit(tx.update)(grads, state, params)

    mesh = make_mesh(axis_type, x=8)
    shardings = optax.tree.map_params(
        tx,
        lambda _: NamedSharding(mesh, P("x")),
        state,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    state = jax.device_put(state, shardings)
    grads, params = jax.device_put((grads, params), NamedSharding(mesh, P()))
    actual = jax.jit(tx.update)(grads, state, params)
    assert actual[1].inner_state.master_weights.sharding.spec == P("x")
    assert_agree(actual, expected)


@pytest.mark.parametrize(
    ("rule", "check_updates"),
    [(RULE, False), pytest.param(ls.HeadroomLossScale(), True, marks=pytest.mark.slow)],
)
def test_state_in_host_memory_stays_there(rule, check_updates):
    if not hasattr(jax, "memory"):
        pytest.skip("this jax has no spaces of memory")
    adam = optax.adam(0.1)
    inner = optax.GradientTransformation(adam.init, jax.jit(adam.update))
    loss_fn = jax.jit(lambda p, factor: jnp.sum(factor * p**2))

    def fetching_update(grads, state, params=None):
        """Fetch the state, and put it back, as offloading does."""
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = inner.update(grads, state, params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    def trained(update, kind):
        place = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        tx = optax.GradientTransformation(inner.init, update)
        tx = ls.with_loss_scaling(tx, rule, check_updates=check_updates)

        def step(carry, factor):
            params, state = carry
            grads = ls.grad(loss_fn, state)(params, factor)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        def run(state):
            factors = np.float32([1.0, np.nan, 2.0])
            return jax.lax.scan(step, (params, state), factors)[0]

        params = np.ones(3, np.float32)
        state = jax.device_put(tx.init(params), place)
        results = jax.jit(run)(state)
        eager = step((params, state), 1.0)[0]
        leaves = jax.tree.leaves((results[1], eager[1]))
        assert {x.sharding.memory_kind for x in leaves} == {kind}
        return jax.device_get(results)

    kinds = {"device": inner.update, "pinned_host": fetching_update}
    assert_same_bits(*(trained(update, kind) for kind, update in kinds.items()))
