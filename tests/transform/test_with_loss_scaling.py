"""with_loss_scaling: what it keeps, what it refuses, every kind of leaf."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits, assert_same_types
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ls
from optax_lossscale._rules import base

PARAMS = {"w": np.arange(4, dtype=np.float32), "b": np.float32(1.0)}
GRADS = {"w": np.float32([0.5, -1.0, 2.0, 0.25]), "b": np.float32(0.125)}
ADAM, SGD = optax.adam(1e-3), optax.sgd(1.0)


def test_the_state_and_the_transformation_are_those_of_optax():
    tx = ls.with_loss_scaling(ADAM)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert tx.init(PARAMS)._fields == ("scale_state", "inner_state")
    assert_same_bits(tx.init(PARAMS).scale_state, ls.DynamicLossScale().init())


def test_optimizer_wrapped_in_a_run_keeps_its_moments():
    adam_update = jax.jit(ADAM.update)
    _, old_state = adam_update(GRADS, ADAM.init(PARAMS), PARAMS)
    tx = ls.with_loss_scaling(ADAM)
    opt_state = tx.init(PARAMS)._replace(inner_state=old_state)
    updates, new_state = jax.jit(tx.update)(GRADS, opt_state, PARAMS)
    expected = adam_update(GRADS, old_state, PARAMS)
    assert_same_bits((updates, new_state.inner_state), expected)


@pytest.mark.parametrize(
    ("options", "applied"),
    [
        ({}, [True, False]),
        ({"axis_name": "i"}, [False, False]),
        ({"check_updates": True}, [False, False]),
    ],
)
def test_skip_nonfinite_is_a_rule_fixed_at_1(options, applied):
    grads = np.float32([[0.5, 3e38], [0.5, np.nan]])
    inner, unit = optax.scale(2.0), ls.FixedLossScale(1.0)
    named = ls.skip_nonfinite(inner, **options)
    step, expected = (
        jax.jit(jax.vmap(f, axis_name="i"))(grads, jax.vmap(named.init)(grads))
        for f in (named.update, ls.with_loss_scaling(inner, unit, **options).update)
    )
    assert_same_bits(step, expected)
    assert step[1].scale_state.applied.tolist() == applied


NEVER_SKIPS = ls.FixedLossScale(skip_nonfinite=False)


@pytest.mark.parametrize(
    ("inner", "options", "error", "message"),
    [
        (ls.DynamicLossScale(), {}, TypeError, "`inner` must be .*got the rule"),
        (optax.adam, {}, TypeError, "`inner` must be .*called as in"),
        (None, {}, TypeError, "`inner` must be an Optax .*got None"),
        (SGD, {"rule": 128.0}, TypeError, "`rule` must be an instance"),
        (SGD, {"rule": ls.DynamicLossScale}, TypeError, "`rule` must be an instance"),
        (SGD, {"rule": DynamicScale()}, TypeError, "flax.*`presets.flax_dynamic_scale"),
        (SGD, {"check_updates": 1}, ValueError, "must be True or False, got 1"),
        (
            *(SGD, {"check_updates": True, "rule": NEVER_SKIPS}, ValueError),
            "`check_updates` must be False",
        ),
    ],
)
def test_what_is_no_optimizer_no_rule_or_no_flag_is_refused(
    inner, options, error, message
):
    with pytest.raises(error, match=message):
        ls.with_loss_scaling(inner, **options)


def test_the_preset_of_a_package_exists():
    for package, preset in base._PRESETS.items():
        assert package in getattr(ls.presets, preset).__doc__


def test_two_wrappers_around_each_other_are_refused():
    tx = ls.with_loss_scaling(optax.chain(ls.with_loss_scaling(SGD)))
    with pytest.raises(ValueError, match="`inner` must not scale losses itself"):
        tx.init(PARAMS)


@pytest.mark.parametrize("restore", [lambda s: s.inner_state, lambda s: s._asdict()])
def test_a_state_of_another_kind_is_refused(restore):
    tx = ls.with_loss_scaling(ADAM)
    with pytest.raises(TypeError, match="`state` must be a WithLossScalingState"):
        tx.update(GRADS, restore(tx.init(PARAMS)), PARAMS)


@pytest.mark.parametrize("tree", [{}, (), None])
def test_an_empty_tree_is_a_step_like_any_other(tree):
    tx = ls.with_loss_scaling(ADAM)
    updates, state = tx.update(tree, tx.init(tree), tree)
    assert updates == tree and ls.was_applied(state)


def test_integer_leaves_with_allow_int():
    params = {"w": np.ones(2, np.float32), "table": np.arange(3, dtype=np.int32)}
    tx = ls.with_loss_scaling(optax.masked(ADAM, {"w": True, "table": False}))
    state = tx.init(params)

    @jax.jit
    def step(params, state, factor):
        def loss_fn(params):
            return factor * jnp.sum(params["w"] ** 2) * params["table"][1]

        _, grads = ls.value_and_grad(loss_fn, state, allow_int=True)(params)
        updates, state = tx.update(grads, state, params)
        assert grads["table"].dtype == updates["table"].dtype == jax.dtypes.float0
        return updates["w"], state

    for factor in (1.0, jnp.nan):
        update, state = step(params, state, factor)
    assert_no_update(update)
    assert int(state.scale_state.skipped_steps) == 1


@dataclasses.dataclass(frozen=True, eq=False)
class UsersRule(ls.LossScale):
    """A rule that makes and changes its state as it is told."""

    first: Any
    change: Any

    def init(self):
        return self.first

    def update(self, state, grads_finite):
        return self.change(state.record(grads_finite))


def test_types_of_the_scale_state_hold_for_any_rule():
    rule = UsersRule(
        ls.LossScaleState.create(8.0),
        lambda s: s._replace(growth_tracker=0, loss_scale=jnp.asarray(4.0)),
    )
    tx = ls.with_loss_scaling(SGD, rule)
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        _, new_state = update(GRADS, state, PARAMS)
        assert_same_types(new_state, state)
        assert float(ls.get_loss_scale(new_state)) == 4.0


@pytest.mark.parametrize("first", [None, 8.0])
def test_a_rule_whose_init_returns_no_state_is_refused(first):
    tx = ls.with_loss_scaling(SGD, UsersRule(first, lambda s: s))
    with pytest.raises(TypeError, match="LossScaleState"):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    "rule_state", [(), np.float32([1, 1])], ids=["structure", "shape"]
)
def test_a_rule_that_changes_its_state_is_refused(rule_state):
    first = ls.LossScaleState.create(1.0, rule_state=np.float32([0]))
    rule = UsersRule(first, lambda s: s._replace(rule_state=rule_state))
    tx = ls.with_loss_scaling(SGD, rule)
    with pytest.raises(ValueError, match="`rule` must have an `update` that keeps"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
