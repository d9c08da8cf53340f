"""One decision, however arrays are sharded and whoever has gradients of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh, set_mesh
from shared import slow_but
from training import make_step, normal, train, transformation

import optax_lossscale as ls
from optax_lossscale._jax_internals import varying_like

MOMENTUM, RULE = optax.sgd(0.1, momentum=0.9), ls.DynamicLossScale(growth_interval=2)
ONES, CHECKED = np.ones(3, np.float32), ["unchecked", "checked"]


def assert_agree(actual, expected):
    """Sums over devices round differently; flags, counters and scales may not."""
    scale_states = (ls.get_loss_scale_state(state) for _, state in (actual, expected))
    assert_same_bits(*map(jax.device_get, scale_states))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def like_params(tx, params, of_params, of_the_rest):
    """A tree like the state: of the parameters for the moments, else of the rest."""
    state, rest = jax.eval_shape(tx.init, params), lambda _: of_the_rest
    return optax.tree.map_params(
        *(tx, lambda _, of_param: of_param, state, of_params), transform_non_params=rest
    )


@pytest.mark.parametrize("check_updates", slow_but([True], [False, True]), ids=CHECKED)
def test_updates_and_state_take_the_sharding_of_the_parameters(check_updates):
    """So does what is kept, also in a skipped step, though the state began unsharded.

    Of weakly typed parameters, optax makes such a state by itself.
    """
    mesh = make_mesh(EXPLICIT, x=8)
    tx = ls.with_loss_scaling(MOMENTUM, RULE, check_updates=check_updates)
    unsharded = np.zeros((8, 2), np.float32)

    @jax.jit
    def step(state, params, grads):
        updates, state = tx.update(grads, state, params)
        return state, updates, ls.keep_if_applied(state, new=params, old=unsharded)

    with set_mesh(mesh):
        params = jnp.full((8, 2), 1.0)
        state = tx.init(params)
        params = jax.device_put(params, NamedSharding(mesh, P("x")))
        for factor in (1.0, np.inf, 1.0):
            grads = jax.device_put(np.full((8, 2), factor, np.float32), params.sharding)
            state, updates, kept = step(state, params, grads)
            for x in (updates, kept, state.inner_state[0].trace):
                assert jax.typeof(x).sharding.spec == P("x", None)
    assert int(state.scale_state.skipped_steps) == 1


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_master_weights_may_be_sharded_alone(axis_type):
    """The layout of ZeRO's first stage."""
    tx = ls.with_loss_scaling(ls.with_master_weights(MOMENTUM))
    params = np.linspace(-1, 1, 16).astype(np.float16)
    grads, state = np.ones_like(params), tx.init(params)
    expected = jax.jit(tx.update)(grads, state, params)
    place = functools.partial(NamedSharding, make_mesh(axis_type, x=8))
    state = jax.device_put(state, like_params(tx, params, place(P("x")), place(P())))
    grads, params = jax.device_put((grads, params), place(P()))
    actual = jax.jit(tx.update)(grads, state, params)
    assert actual[1].inner_state.master_weights.sharding.spec == P("x")
    assert_agree(actual, expected)


FACTORS = np.float32([1.0, np.nan, 2.0])


@functools.partial(jax.jit, static_argnums=0)
def in_scan(step, carry):
    return jax.lax.scan(lambda c, x: (step(*c, x), None), carry, FACTORS)[0]


def eagerly(step, carry):
    return train(step, *carry, FACTORS)


@pytest.mark.skipif(not hasattr(jax, "memory"), reason="jax has no spaces of memory")
@pytest.mark.parametrize(
    ("rule", "check_updates"),
    [(RULE, False), pytest.param(ls.HeadroomLossScale(), True, marks=pytest.mark.slow)],
    ids=["dynamic", "headroom, checked"],
)
@pytest.mark.parametrize("run", slow_but([in_scan], [in_scan, eagerly]))
def test_state_in_host_memory_stays_and_trains_alike(run, rule, check_updates):
    """The inner optimizer fetches it, as offloading does; the wrapper moves nothing."""
    plain_update = jax.jit(MOMENTUM.update)

    def fetching_update(grads, state, params=None):
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = plain_update(grads, state, params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    def trained(update, kind):
        tx = optax.GradientTransformation(MOMENTUM.init, update)
        tx = ls.with_loss_scaling(tx, rule, check_updates=check_updates)
        step = make_step(tx, jax.jit(lambda p, factor: jnp.sum(factor * p**2)))
        place = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        results = run(step, (ONES, jax.device_put(tx.init(ONES), place)))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(results[1])}
        assert kinds == {kind}
        return jax.device_get(results)

    plain = trained(plain_update, "device")
    assert_same_bits(trained(fetching_update, "pinned_host"), plain)


def test_sharded_rows_and_skips_equal_those_of_one_device():
    """As in FSDP: weights are gathered, and gradients are scattered."""
    tx = ls.with_loss_scaling(MOMENTUM, RULE, axis_name="d")
    alone = ls.with_loss_scaling(MOMENTUM, RULE)
    specs, params = {"w": P("d"), "b": P()}, {"w": normal(8, 4), "b": normal(4)}
    state_specs, batches = like_params(tx, params, specs, P()), normal(5, 16, 8)
    batches[2, 11, 3] = np.nan  # in the part of one device

    def loss_fn(params, x):
        return jnp.mean(jnp.square(x @ params["w"] + params["b"] - 1.0))

    def step(params, state, x):
        whole = {"w": jax.lax.all_gather(params["w"], "d", tiled=True)}
        whole["b"] = varying_like(params["b"], whole["w"])
        _, grads = ls.value_and_grad(loss_fn, state)(whole, x)
        own = jax.lax.psum_scatter(grads["w"], "d", tiled=True) / 8
        grads = {"w": own, "b": jax.lax.pmean(grads["b"], "d")}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_mesh(step, (specs, state_specs, P("d")), (specs, state_specs))
    actual = train(step, params, tx.init(params), batches)
    step = jax.jit(make_step(alone, loss_fn))
    assert_agree(actual, train(step, params, alone.init(params), batches))
    sharding = NamedSharding(make_mesh(d=8), P("d"))
    assert actual[1].inner_state[0].trace["w"].sharding.is_equivalent_to(sharding, 2)
    assert int(actual[1].scale_state.skipped_steps) == 1


# What differs between devices, each of which has a number.
THROUGH = {
    "grads": lambda x: {"updates": x * ONES},
    "params": lambda x: {"params": x * ONES},
    "grads_finite": lambda x: {"grads_finite": x > 0},
    "value": lambda x: {"value": x},
}


@pytest.mark.parametrize(
    ("axis_name", "axes"), [(None, "'d', 'e'"), ("d", "'e'")], ids=["no axis", "one"]
)
@pytest.mark.parametrize("through", THROUGH)
def test_devices_that_share_a_state_may_not_disagree(axis_name, axes, through):
    is_checked = through == "params"
    tx = ls.with_loss_scaling(MOMENTUM, axis_name=axis_name, check_updates=is_checked)

    def step(state, x):
        given = {"updates": ONES, "params": ONES, **THROUGH[through](x[0])}
        return tx.update(state=state, **given)

    step = on_mesh(step, (P(), P(("d", "e"))), P(), make_mesh(d=2, e=4))
    with pytest.raises(ValueError, match=rf"`axis_name` must name every .*\[{axes}\]"):
        jax.eval_shape(step, tx.init(ONES), np.ones(8, np.float32))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize(
    "in_loop", [True, False], ids=["collective in a loop", "no collective"]
)
def test_devices_with_models_of_their_own_skip_alone(in_loop, check_vma):
    """Each has a state, but they share a leaf, which then differs.

    In a loop whose length is in the state, one that skips still reaches the collective.
    """

    def along(_, x):
        return 0 * x + jax.lax.pmax(x, "d")

    def update(g, own, shared):
        largest = jnp.sum(own)
        if in_loop:
            largest = jax.lax.fori_loop(0, own[0].astype(int), along, largest)
        return g * largest, (own + 1, shared + 1)

    tx = ls.with_loss_scaling(transformation(update, ONES, ONES))

    def on_each(losses, scale_states, owns, shared):
        loss, scale_state, own = (
            jax.tree.map(lambda x: x[0], x) for x in (losses, scale_states, owns)
        )
        state = ls.WithLossScalingState(scale_state, (own, shared))
        return jax.tree.map(lambda x: x[None], tx.update(ONES, state, value=loss))

    specs, mesh = (P("d"), P("d"), P("d"), P()), make_mesh(d=4)
    step = on_mesh(on_each, specs, P("d"), mesh, check_vma=check_vma)
    states = jax.jit(jax.vmap(tx.init))(np.stack([ONES] * 4))  # as the error says
    losses = np.float32([1.0, np.nan, 1.0, 1.0])
    new = step(losses, states.scale_state, states.inner_state[0], ONES)
    updates, states = jax.device_get(new)
    assert updates[:, 0].tolist() == [3.0, 0.0, 3.0, 3.0]
    assert states.scale_state.skipped_steps.tolist() == [0, 1, 0, 0]
    for leaf in states.inner_state:
        assert leaf[:, 0].tolist() == [2.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("place", ["shard_map", "jit"])
def test_overflow_in_the_optimizer_skips_the_step_on_all_devices(place):
    """With `check_updates`, whether devices update shards, or arrays are global."""
    axis_name = "d" if place == "shard_map" else None
    adam = optax.adam(0.1)
    tx = ls.with_loss_scaling(adam, axis_name=axis_name, check_updates=True)
    params, grads = np.ones((2, 16), np.float32)
    grads[5] = 1e30  # on one device

    def step(params, grads):
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), ls.was_applied(state)

    step = on_mesh(step, P("d"), (P("d"), P())) if axis_name else jax.jit(step)
    placed = jax.device_put((params, grads), NamedSharding(make_mesh(d=8), P("d")))
    new_params, applied = step(*placed)
    assert not applied
    assert_same_bits(new_params, params)
