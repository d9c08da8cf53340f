"""The rules that are given the largest gradient of each step."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import ADAM, BATCHES, PARAMS, loss_fn, vary
from flax import serialization
from helpers import assert_same_bits, make_step, set_mesh, train
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

RULES = {
    "headroom": ls.HeadroomLossScale(half_life=10),
    "log-normal": ls.LogNormalLossScale(),
}


every_rule = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(
            rule, id=name, marks=() if name == "headroom" else pytest.mark.slow
        )
        for name, rule in RULES.items()
    ],
)


def run(rule, xs, **arguments):
    tx = ls.with_loss_scaling(ADAM, rule, **arguments)
    return train(jax.jit(make_step(tx, loss_fn)), PARAMS, tx.init(PARAMS), xs)


@every_rule
@pytest.mark.parametrize("batches", BATCHES)
def test_the_rule_is_given_the_largest_gradient_of_each_step(rule, batches):
    params, state = PARAMS, rule.init()
    tx = ls.with_loss_scaling(ADAM, ls.FixedLossScale(1.0))
    opt_state = tx.init(params)
    for x in BATCHES[batches]:
        grads = jax.jit(jax.grad(loss_fn))(params, x)
        state = rule.update(state, ls.all_finite(grads), ls.max_magnitude(grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    _, reached = run(rule, BATCHES[batches])
    actual, expected = ls.get_loss_scale_state(reached), state
    assert float(actual.loss_scale) != rule.init_scale
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4)
    assert int(actual.skipped_steps) == (batches == "bad")


@every_rule
@pytest.mark.parametrize("batches", BATCHES)
def test_every_device_has_the_largest_gradient_of_all(rule, batches):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    tx = ls.with_loss_scaling(ADAM, rule, axis_name="d")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P())
    )
    def step(params, state, x):
        # Each device differentiates its own part of the batch.
        grads = jax.grad(loss_fn)(vary(params, "d"), x)
        largest = jax.lax.pmax(ls.max_magnitude(grads), "d")
        flag = ls.all_finite(grads, "d")
        _, new_state = tx.update(grads, state, vary(params, "d"))
        return new_state.scale_state, (flag, largest)

    # The moments differ from device to device and stay behind.
    state = tx.init(PARAMS)
    for x in BATCHES[batches]:
        expected = state.scale_state
        scale_state, (flag, largest) = step(PARAMS, state, x)
        expected = rule.update(expected, flag, largest)
        assert_same_bits(jax.device_get(scale_state), jax.device_get(expected))
        state = state._replace(scale_state=scale_state)


@every_rule
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_gradients_give_the_scale_of_one_device(rule, kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    grads = {"w": jnp.arange(32.0).reshape(8, 4), "b": -100 * jnp.ones(8)}
    tx = ls.with_loss_scaling(ADAM, rule)
    _, expected = jax.jit(tx.update)(grads, tx.init(grads), grads)
    sharded = jax.device_put(grads, NamedSharding(mesh, P("d")))
    with set_mesh(mesh):
        opt_state = jax.jit(tx.init)(sharded)
        _, opt_state = jax.jit(tx.update)(sharded, opt_state, sharded)
    assert_same_bits(
        jax.device_get(opt_state.scale_state), jax.device_get(expected.scale_state)
    )


@every_rule
def test_a_loss_that_is_not_finite_leaves_the_memory_alone(rule):
    tx = ls.with_loss_scaling(ADAM, rule)
    opt_state = tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    _, opt_state = tx.update(grads, opt_state, PARAMS)
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    _, after = tx.update(bad, opt_state, PARAMS, value=jnp.nan)
    before = opt_state.scale_state
    assert_same_bits(after.scale_state.rule_state, before.rule_state)
    assert float(after.scale_state.loss_scale) == float(before.loss_scale)
    assert int(after.scale_state.skipped_steps) == 1


@every_rule
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_the_state_can_be_differentiated_through_a_skipped_step(rule, bad):
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule)

    def last(x):
        opt_state, params = tx.init(x), x
        for factor, term in ((1.0, 0.0), (1.0, bad), (2.0, 0.0)):
            updates, opt_state = tx.update(factor * x + term, opt_state, params)
            params = optax.apply_updates(params, updates)
        state = ls.get_loss_scale_state(opt_state)
        return jnp.sum(params), (state.loss_scale, *state.rule_state)

    # The first and the third step are applied: x - 0.1 x - 0.2 x.
    of_params, of_state = jax.jacobian(last)(jnp.ones(2))
    np.testing.assert_allclose(of_params, 0.7, rtol=1e-6)
    np.testing.assert_array_equal(of_state, 0.0)


@every_rule
def test_an_ensemble_has_a_scale_for_each_member(rule):
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
    params = jnp.ones((3, 2))
    grads = jnp.array([1.0, 2.0**-10, jnp.inf])[:, None] * params
    opt_state = jax.vmap(tx.init)(params)
    _, opt_state = jax.vmap(tx.update)(grads, opt_state, params)
    state = opt_state.scale_state
    for member, magnitude in enumerate([1.0, 2.0**-10, jnp.inf]):
        alone = rule.update(rule.init(), bool(np.isfinite(magnitude)), magnitude)
        assert float(state.loss_scale[member]) == float(alone.loss_scale)


class Longest(NamedTuple):
    longest_run: jax.Array


@dataclasses.dataclass(frozen=True)
class Cautious(ls.LossScale):
    """A user's rule with a memory, and with the largest gradient."""

    uses_max_magnitude: ClassVar[bool] = True

    def init(self):
        return ls.LossScaleState.create(8.0, rule_state=Longest(jnp.int32(0)))

    def update(self, state, grads_finite, max_magnitude):
        state = state.record(grads_finite)
        run = jnp.maximum(state.rule_state.longest_run, state.consecutive_skips)
        scale = jnp.where(max_magnitude > 1.0, 1.0, state.loss_scale)
        return state._replace(loss_scale=scale, rule_state=Longest(run))


def test_a_users_rule_may_have_a_memory_and_the_largest_gradient():
    tx = ls.with_loss_scaling(optax.sgd(0.1), Cautious())
    opt_state = tx.init(jnp.ones(2))
    for value, scale, longest in ((0.5, 8, 0), (jnp.nan, 8, 1), (2.0, 1, 1)):
        grads = jnp.full(2, value)
        _, opt_state = jax.jit(tx.update)(grads, opt_state, jnp.ones(2))
        assert float(ls.get_loss_scale(opt_state)) == scale
        assert int(optax.tree.get(opt_state, "longest_run")) == longest
    saved = serialization.to_bytes(opt_state)
    restored = serialization.from_bytes(tx.init(jnp.ones(2)), saved)
    assert_same_bits(restored, opt_state)
