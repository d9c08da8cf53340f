"""The rules that are given the largest gradient of each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh, set_mesh

import optax_lossscale as ls

GRADS = {"w": jnp.arange(32.0).reshape(8, 4), "b": -100 * jnp.ones(8)}

RULE = ls.HeadroomLossScale(half_life=10)


def test_the_rule_is_given_the_largest_gradient_of_each_step():
    """But not if the loss itself is not finite."""
    tx = ls.with_loss_scaling(optax.sgd(0.1), RULE)
    state, expected = tx.init(GRADS), RULE.init()
    for factor, value in ((1.0, 1.0), (jnp.nan, 1.0), (9.0, jnp.nan), (1e3, 1.0)):
        grads = optax.tree.scale(factor, GRADS)
        _, state = jax.jit(tx.update)(grads, state, GRADS, value=value)
        if np.isfinite(value):
            magnitude = ls.max_magnitude(grads)
            expected = RULE.update(expected, bool(np.isfinite(factor)), magnitude)
        else:
            expected = expected.record(False)
        assert_same_bits(state.scale_state, expected)
    assert float(expected.loss_scale) != RULE.init_scale


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_all_devices_have_the_scale_of_one_device(kind):
    """Where each has its own gradients, and where arrays are global."""
    mesh = make_mesh(kind, d=8)
    bad = {**GRADS, "b": GRADS["b"].at[5].set(jnp.inf)}

    def scale_state(grads, axis_name=None):
        tx = ls.with_loss_scaling(optax.sgd(0.1), RULE, axis_name=axis_name)
        return tx.update(grads, tx.init(grads), grads)[1].scale_state

    mapped = on_mesh(lambda grads: scale_state(grads, "d"), P("d"), P(), mesh)
    for grads in (GRADS, bad):
        expected = jax.device_get(jax.jit(scale_state)(grads))
        placed = jax.device_put(grads, NamedSharding(mesh, P("d")))
        with set_mesh(mesh):
            for function in (mapped, jax.jit(scale_state)):
                assert_same_bits(jax.device_get(function(placed)), expected)
