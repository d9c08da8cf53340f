"""One decision, however arrays are sharded and whoever has gradients of its own."""

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
    vary,
)
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh, set_mesh
from shared import slow_but
from training import make_step, train, transformation

import optax_lossscale as ls

ONES = np.ones(3, np.float32)
# The axes of the mesh, and what shards the weights and the bias.
LAYOUTS = {
    "data-parallel": ({"data": 8}, P(), P()),
    "fully sharded": ({"data": 8}, P("data"), P()),
    "two axes": ({"data": 2, "model": 4}, P("data", "model"), P("model")),
}


def specs(tree):
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("layout", slow_but([*LAYOUTS][:2], LAYOUTS))
def test_mesh_equals_one_device(axis_type, layout):
    """With one program, which donates, and shards the state as the parameters."""
    axes, *params_specs = LAYOUTS[layout]
    mesh = make_mesh(axis_type, **axes)
    shard = functools.partial(NamedSharding, mesh)
    shardings = dict(zip("wb", map(shard, params_specs), strict=True))

    def gathered_loss_fn(params, x):
        is_explicit = axis_type == EXPLICIT
        return loss_fn(jax.sharding.reshard(params, P()) if is_explicit else params, x)

    with set_mesh(mesh):
        params = jax.device_put(jax.device_get(PARAMS), shardings)
        out = shardings, like_params(TX, shardings, shard(P()))
        state = jax.jit(TX.init, out_shardings=out[1])(params)
        first = jax.tree.map(lambda x: (x.sharding, x.aval), state)
        chex.clear_trace_counter()

        @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out)
        @chex.assert_max_traces(1)
        def step(params, state, x):
            new_params, new_state = make_step(TX, gathered_loss_fn)(params, state, x)
            assert axis_type == AUTO or specs(new_state) == specs(state)
            return new_params, new_state

        batches = [jax.device_put(x, shard(P("data"))) for x in BAD_X]
        params, state = train(step, params, state, batches)
    assert jax.tree.map(lambda x: (x.sharding, x.aval), state) == first
    assert state.inner_state[0].mu["w"].sharding.spec == params_specs[0]
    assert int(state.scale_state.skipped_steps) == 1
    assert_agree((params, state), alone(BAD_X))


@pytest.mark.parametrize("check_updates", slow_but((True,), (True, False)))
def test_state_takes_the_sharding_of_its_parameters(check_updates):
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
    place = functools.partial(NamedSharding, make_mesh(axis_type, x=8))
    shardings = optax.tree.map_params(
        *(tx, lambda _: place(P("x")), state),
        transform_non_params=lambda _: place(P()),
    )
    grads, params = jax.device_put((grads, params), place(P()))
    actual = jax.jit(tx.update)(grads, jax.device_put(state, shardings), params)
    assert actual[1].inner_state.master_weights.sharding.spec == P("x")
    assert_agree(actual, expected)


@pytest.mark.skipif(not hasattr(jax, "memory"), reason="jax has no spaces of memory")
@pytest.mark.parametrize(
    ("rule", "check_updates"),
    [(RULE, False), pytest.param(ls.HeadroomLossScale(), True, marks=pytest.mark.slow)],
)
def test_state_in_host_memory_stays_there(rule, check_updates):
    """The optimizer fetches it, and puts it back, as offloading does."""
    adam, params = optax.adam(0.1), np.ones(3, np.float32)
    plain_update = jax.jit(adam.update)
    loss_fn = jax.jit(lambda p, factor: jnp.sum(factor * p**2))

    def fetching_update(grads, state, params=None):
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = plain_update(grads, state, params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    def trained(update, kind):
        tx = optax.GradientTransformation(adam.init, update)
        tx = ls.with_loss_scaling(tx, rule, check_updates=check_updates)
        step = make_step(tx, loss_fn)
        place = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        state = jax.device_put(tx.init(params), place)
        scan = jax.jit(
            lambda state: jax.lax.scan(
                lambda carry, x: (step(*carry, x), None),
                (params, state),
                np.float32([1.0, np.nan, 2.0]),
            )[0]
        )
        results, eager = scan(state), step(params, state, 1.0)
        leaves = jax.tree.leaves((results[1], eager[1]))
        assert {x.sharding.memory_kind for x in leaves} == {kind}
        return jax.device_get(results)

    kinds = {"device": plain_update, "pinned_host": fetching_update}
    assert_same_bits(*(trained(update, kind) for kind, update in kinds.items()))


def test_devices_that_update_their_own_rows_equal_one_device():
    """Gather the weights, scatter the gradients."""
    tx = ls.with_loss_scaling(ADAM, RULE, axis_name="d")
    specs = {"w": P("d"), "b": P()}
    state_specs = like_params(tx, specs, P())

    def step(params, state, x):
        whole = {
            "w": jax.lax.all_gather(params["w"], "d", tiled=True),
            "b": vary(params["b"], "d"),
        }
        _, grads = ls.value_and_grad(loss_fn, state)(whole, x)
        grads = {
            "w": jax.lax.psum_scatter(grads["w"], "d", tiled=True) / 8,
            "b": jax.lax.pmean(grads["b"], "d"),
        }
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_mesh(step, (specs, state_specs, P("d")), (specs, state_specs))
    params, state = train(step, PARAMS, tx.init(PARAMS), BAD_X)
    sharding = NamedSharding(make_mesh(d=8), P("d"))
    assert state.inner_state[0].mu["w"].sharding.is_equivalent_to(sharding, 2)
    assert int(state.scale_state.skipped_steps) == 1
    assert_agree((params, state), alone(BAD_X))


@pytest.mark.parametrize(("axis_name", "axes"), [(None, "'d', 'e'"), ("d", "'e'")])
@pytest.mark.parametrize("through", ["grads", "grads_finite", "value", "params"])
def test_devices_may_not_decide_differently(axis_name, axes, through):
    is_checked = through == "params"
    tx = ls.with_loss_scaling(ADAM, axis_name=axis_name, check_updates=is_checked)

    def step(params, state, x):
        own = jax.tree.map(lambda p: p * x[0], params)
        grads = own if through == "grads" else params
        given = {"value": x[0], "grads_finite": x[0] > 0}
        given = {name: x for name, x in given.items() if name == through}
        return tx.update(grads, state, own if is_checked else params, **given)

    step = on_mesh(step, (P(), P(), P(("d", "e"))), P(), make_mesh(d=2, e=4))
    with pytest.raises(ValueError, match=rf"`axis_name` must name every .*\[{axes}\]"):
        jax.eval_shape(step, PARAMS, tx.init(PARAMS), np.ones(8, np.float32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_with_models_of_their_own_skip_alone(check_vma):
    """And all of them reach a collective, even in a loop of the optimizer.

    With ``check_vma=False`` jax does not know what varies, and nothing is refused.
    """

    def update(g, m):
        largest = jax.lax.fori_loop(
            0, m[0].astype(int), lambda i, x: 0 * x + jax.lax.pmax(x, "d"), jnp.sum(m)
        )
        return g * largest, (m + 1,)

    tx = ls.with_loss_scaling(transformation(update, ONES))

    def on_each(losses, state):
        loss, state = jax.tree.map(lambda x: x[0], (losses, state))
        return jax.tree.map(lambda x: x[None], tx.update(ONES, state, value=loss))

    step = on_mesh(on_each, P("d"), P("d"), make_mesh(d=4), check_vma=check_vma)
    states = jax.vmap(tx.init)(np.stack([ONES] * 4))  # as the error says
    updates, states = step(np.float32([1.0, np.nan, 1.0, 1.0]), states)
    assert np.asarray(updates)[:, 0].tolist() == [3.0, 0.0, 3.0, 3.0]
    assert states.scale_state.skipped_steps.tolist() == [0, 1, 0, 0]


def test_devices_that_skip_alone_may_share_a_leaf_of_the_state():
    """After the step the leaf differs, because not every device has applied it."""
    tx = ls.with_loss_scaling(transformation(lambda g, m: (g, (m + 1,)), ONES))

    def on_each(losses, scale_states, shared):
        loss, scale_state = jax.tree.map(lambda x: x[0], (losses, scale_states))
        state = ls.WithLossScalingState(scale_state, shared)
        return tx.update(ONES, state, value=loss)[1].inner_state[0][None]

    step = on_mesh(on_each, (P("d"), P("d"), P()), P("d"), make_mesh(d=2))
    state = tx.init(ONES)
    scale_states = jax.tree.map(lambda x: np.stack([x] * 2), state.scale_state)
    new = step(np.float32([1.0, np.nan]), scale_states, state.inner_state)
    assert (np.asarray(new) - ONES)[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("spec", [P("d"), P()])
def test_results_that_are_bad_on_one_device_are_skipped_on_all(spec):
    """With `check_updates`, whether devices update shards, or arrays are global."""
    params, grads = np.ones((2, 16), np.float32)
    grads[5] = 1e30  # on one device

    def step(axis_name, params, grads):
        options = {"axis_name": axis_name, "check_updates": True}
        tx = ls.with_loss_scaling(optax.adam(0.1), **options)
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), ls.was_applied(state)

    mapped = on_mesh(functools.partial(step, "d"), P("d"), (P("d"), P()))
    placed = jax.device_put((params, grads), NamedSharding(make_mesh(d=8), spec))
    for function in (mapped, jax.jit(functools.partial(step, None))):
        new_params, applied = function(*placed)
        assert not applied
        assert_same_bits(new_params, params)
