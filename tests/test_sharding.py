"""The same decision on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

PARAMS = {"w": jnp.arange(16.0).reshape(8, 2) / 16, "b": jnp.zeros(2)}
X = jax.random.normal(jax.random.key(0), (5, 16, 8))
BAD_X = X.at[2, 11, 3].set(jnp.nan)  # in the part of one device alone
RULE = ls.DynamicLossScale(growth_interval=2)


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"] - 1.0))


def one_device(xs):
    tx = ls.with_loss_scaling(optax.adam(1e-2), RULE)
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, x):
        loss, grads = ls.value_and_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for x in xs:
        params, state = step(params, state, x)
    return params, state


def assert_close(actual, expected):
    """Sums over devices round differently; flags, counters and scales may not."""
    assert_same_bits(
        jax.device_get(ls.get_loss_scale_state(actual)),
        jax.device_get(ls.get_loss_scale_state(expected)),
    )
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def vary(x):
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, "d", to="varying")
    return jax.lax.pvary(x, "d")


def shardings(tree):
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(), P("d")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("xs", [X, BAD_X], ids=["good", "bad"])
def test_jit_over_a_mesh_equals_one_device(axis_type, spec, xs):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    tx = ls.with_loss_scaling(optax.adam(1e-2), RULE)
    with set_mesh(mesh):
        params = {
            "w": jax.device_put(PARAMS["w"], NamedSharding(mesh, spec)),
            "b": jax.device_put(PARAMS["b"], NamedSharding(mesh, P())),
        }
        state = jax.jit(tx.init)(params)
        traces = []

        @jax.jit
        def step(params, state, x):
            traces.append(1)
            loss, grads = ls.value_and_grad(sharded_loss, state)(params, x)
            updates, new_state = tx.update(grads, state, params)
            assert shardings(new_state) == shardings(state)
            return optax.apply_updates(params, updates), new_state

        def sharded_loss(params, x):
            if axis_type == AxisType.Explicit and spec == P("d"):
                params = {**params, "w": jax.sharding.reshard(params["w"], P())}
            return loss_fn(params, x)

        for x in xs:
            x = jax.device_put(x, NamedSharding(mesh, P("d")))
            params, state = step(params, state, x)
    if axis_type == AxisType.Explicit:
        assert len(traces) == 1
    assert_close((params, state), one_device(xs))


@pytest.mark.parametrize("collective", [False, True])
def test_shard_map_with_gradients_of_each_device_skips_everywhere(collective):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def mean_over_devices(updates, state, params=None):
        return jax.lax.pmean(updates, "d"), state

    inner = optax.adam(1e-2)
    if collective:
        # A collective that some devices do not reach would never return.
        average = optax.GradientTransformation(lambda p: (), mean_over_devices)
        inner = optax.chain(average, inner)
    tx = ls.with_loss_scaling(inner, RULE, axis_name="d")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P())
    )
    def step(params, state, x):
        # Else shard_map sums the gradients over the devices by itself.
        local = jax.tree.map(vary, params)
        _, grads = ls.value_and_grad(loss_fn, state)(local, x)
        if not collective:
            grads = jax.lax.pmean(grads, "d")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for x in BAD_X:
        params, state = step(params, state, x)
    expected_params, expected_state = one_device(BAD_X)
    assert int(ls.get_loss_scale_state(state).skipped_steps) == 1
    assert_same_bits(
        jax.device_get(ls.get_loss_scale_state(state)),
        jax.device_get(expected_state.scale_state),
    )
    for a, e in zip(
        jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_without_an_axis_name_devices_would_disagree():
    """A meta-test: the case above is one in which only one device sees the NaN."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    grads = jnp.ones(8).at[5].set(jnp.inf)
    check = jax.shard_map(
        lambda g: ls.all_finite(g)[None], mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    assert check(grads).tolist() == [True] * 5 + [False] + [True] * 2
    together = jax.shard_map(
        lambda g: ls.all_finite(g, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    assert not together(grads) and together(jnp.ones(8))
