"""with_loss_scaling: what it keeps, what it refuses, every kind of leaf."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits, assert_same_types, enable_x64

import optax_lossscale as ls

PARAMS = {"w": jnp.arange(4.0), "b": jnp.ones(())}
GRADS = {"w": jnp.array([0.5, -1.0, 2.0, 0.25]), "b": jnp.float32(0.125)}
BAD_GRADS = {**GRADS, "w": GRADS["w"].at[2].set(jnp.nan)}
ADAM, SGD = optax.adam(1e-3), optax.sgd(1.0)


def test_a_good_step_is_the_optimizers_own_and_a_bad_one_only_backs_off():
    tx = ls.with_loss_scaling(ADAM)
    state = tx.init(PARAMS)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert state._fields == ("scale_state", "inner_state")
    assert_same_bits(state.scale_state, ls.DynamicLossScale().init())
    updates, good = tx.update(GRADS, state, PARAMS)
    expected = ADAM.update(GRADS, ADAM.init(PARAMS), PARAMS)
    assert_same_bits((updates, good.inner_state), expected)
    updates, bad = tx.update(BAD_GRADS, good, PARAMS)
    assert_no_update(updates)
    assert_same_bits(bad.inner_state, good.inner_state)
    expected = ls.DynamicLossScale().update(good.scale_state, False)
    assert_same_bits(bad.scale_state, expected)


def test_an_optimizer_is_wrapped_in_the_middle_of_a_run_and_keeps_its_moments():
    _, old_state = ADAM.update(GRADS, ADAM.init(PARAMS), PARAMS)
    tx = ls.with_loss_scaling(ADAM)
    opt_state = tx.init(PARAMS)._replace(inner_state=old_state)
    updates, new_state = jax.jit(tx.update)(GRADS, opt_state, PARAMS)
    expected = jax.jit(ADAM.update)(GRADS, old_state, PARAMS)
    assert_same_bits((updates, new_state.inner_state), expected)


NEVER_SKIPS = ls.FixedLossScale(skip_nonfinite=False)


@pytest.mark.parametrize(
    "inner, options, error, message",
    [
        (ls.DynamicLossScale(), {}, TypeError, r"got the rule DynamicLossScale\(.*fir"),
        (optax.adam, {}, TypeError, r"called as in `.*\(optax.adam\(1e-3\)\)`"),
        (optax.MultiSteps, {}, TypeError, "called as in"),
        (None, {}, TypeError, "`inner` must be an Optax .*got None. Pass an optimizer"),
        (1e-3, {}, TypeError, "got 0.001. Pass an optimizer"),
        *(
            (SGD, {"rule": x}, TypeError, "`rule` must be an instance.*FixedLos")
            for x in (128.0, ls.DynamicLossScale, "dynamic", None, SGD)
        ),
        (SGD, {"check_updates": 1}, ValueError, "must be True or False, got 1"),
        (
            *(SGD, {"check_updates": True, "rule": NEVER_SKIPS}, ValueError),
            "`check_updates` must be False with FixedLossScale.*never skips",
        ),
    ],
)
def test_what_is_no_optimizer_no_rule_or_no_flag_is_refused(
    inner, options, error, message
):
    with pytest.raises(error, match=message):
        ls.with_loss_scaling(inner, **options)


def test_two_wrappers_around_each_other_are_refused():
    tx = ls.with_loss_scaling(optax.chain(ls.with_loss_scaling(SGD)))
    with pytest.raises(ValueError, match="`inner` must not scale losses itself"):
        tx.init(PARAMS)


@pytest.mark.parametrize("restore", [lambda s: s.inner_state, lambda s: s._asdict()])
def test_a_state_of_another_kind_is_refused(restore):
    tx = ls.with_loss_scaling(ADAM)
    with pytest.raises(TypeError, match="`state` must be a WithLossScalingState"):
        tx.update(GRADS, restore(tx.init(PARAMS)), PARAMS)


def test_zero_updates_are_made_of_the_output_of_the_inner_transformation():
    """Lookahead takes one tree of gradients and returns updates for two."""
    params = optax.LookaheadParams.init_synced(PARAMS)
    tx = ls.with_loss_scaling(optax.lookahead(SGD, 2, 0.5))
    updates, _ = tx.update(BAD_GRADS, tx.init(params), params)
    assert_no_update(updates)
    assert isinstance(updates, optax.LookaheadParams)


@pytest.mark.parametrize(
    "good, bad",
    [
        (jnp.ones(2, "c8"), jnp.array([1j, complex(0, np.nan)], "c8")),
        (jnp.ones(2, "c8"), jnp.array([1j, complex(np.inf, 0)], "c8")),
        ((jnp.ones(2), None), (jnp.full(2, jnp.inf), None)),
    ],
    ids=["imaginary nan", "real inf", "none"],
)
def test_complex_numbers_and_none_are_leaves_like_any_other(good, bad):
    tx = ls.with_loss_scaling(ADAM)
    updates, state = tx.update(good, tx.init(good), good)
    assert_same_types(updates, good)
    assert ls.all_finite(updates) and ls.was_applied(state)
    updates, new_state = tx.update(bad, state, good)
    assert_no_update(updates)
    assert_same_bits(new_state.inner_state, state.inner_state)


@pytest.mark.parametrize("tree", [{}, (), None])
def test_an_empty_tree_is_a_step_like_any_other(tree):
    tx = ls.with_loss_scaling(ADAM)
    updates, state = tx.update(tree, tx.init(tree), tree)
    assert updates == tree and ls.was_applied(state)


def test_float64_under_x64():
    with enable_x64(True):
        params = jnp.arange(3.0)
        tx = ls.with_loss_scaling(ADAM)
        state = tx.init(params)
        updates, new_state = jax.jit(tx.update)(params, state, params)
        assert updates.dtype == jnp.float64
        assert_same_types(new_state, state)
        assert new_state.scale_state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("jit", [False, True])
def test_integer_leaves_with_allow_int(jit):
    params = {"w": jnp.ones(2), "table": jnp.arange(3)}
    tx = ls.with_loss_scaling(optax.masked(ADAM, {"w": True, "table": False}))
    state = tx.init(params)

    def loss_fn(params):
        return jnp.sum(params["w"] ** 2) * params["table"][1]

    def step(params, state, factor):
        fun = ls.value_and_grad(lambda p: factor * loss_fn(p), state, allow_int=True)
        _, grads = fun(params)
        updates, state = tx.update(grads, state, params)
        assert grads["table"].dtype == updates["table"].dtype == jax.dtypes.float0
        return updates["w"], state

    step = jax.jit(step) if jit else step
    for factor in (1.0, jnp.nan):
        update, state = step(params, state, factor)
    assert_no_update(update)
    assert int(state.scale_state.skipped_steps) == 1


@dataclasses.dataclass(frozen=True)
class UsersRule(ls.LossScale):
    """A rule that makes and changes its state as it is told."""

    first: Any
    change: Any

    def init(self):
        return self.first

    def update(self, state, grads_finite):
        return self.change(state.record(grads_finite))


def test_the_types_of_the_scale_state_hold_whatever_a_rule_returns():
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


@pytest.mark.parametrize("first", [None, 8.0, (), jnp.ones(())])
def test_a_rule_whose_init_returns_no_state_is_refused(first):
    tx = ls.with_loss_scaling(SGD, UsersRule(first, lambda s: s))
    with pytest.raises(TypeError, match="`init` that returns a LossScaleState, got"):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s._replace(rule_state=()), "an `update` that keeps the structure"),
        (
            lambda s: s._replace(rule_state=jnp.append(s.rule_state, 1.0)),
            r"the shapes of the state, got .*\(2,\)\) for",
        ),
    ],
    ids=["structure", "shape"],
)
def test_a_rule_that_changes_its_state_is_refused(change, message):
    first = ls.LossScaleState.create(1.0, rule_state=jnp.zeros(1))
    tx = ls.with_loss_scaling(SGD, UsersRule(first, change))
    with pytest.raises(ValueError, match=f"`rule` must have .*{message}"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_the_state_of_another_rule_is_refused_with_the_way_to_go_on():
    headroom = ls.HeadroomLossScale()
    old = ls.with_loss_scaling(ADAM).init(PARAMS)
    tx = ls.with_loss_scaling(ADAM, headroom)
    with pytest.raises(ValueError, match="^`state` must have the `rule_state` of Head"):
        jax.jit(tx.update)(GRADS, old, PARAMS)
    opt_state = old._replace(scale_state=headroom.init())
    _, opt_state = jax.jit(tx.update)(GRADS, opt_state, PARAMS)
    assert int(opt_state.inner_state[0].count) == 1


@pytest.mark.parametrize("number", [8, 0, -1.0, np.float16(np.inf), np.nan, "half"])
def test_whatever_number_is_put_into_the_state_the_run_goes_on_in_float32(number):
    rule = ls.DynamicLossScale(init_scale=2.0**17)
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
    state = first = tx.init(PARAMS)
    if number == "half":  # as a cast of the whole optimizer state
        state = optax.tree.cast(state, jnp.float16)
    else:
        state = optax.tree.set(state, loss_scale=number)
    for _ in range(4):
        _, grads = ls.value_and_grad(lambda p: jnp.sum(p["w"]), state)(PARAMS)
        _, state = tx.update(grads, state, PARAMS)
        assert_same_types(state.scale_state, first.scale_state)
    assert bool(ls.was_applied(state))
    assert 1 <= float(ls.get_loss_scale(state)) <= 2.0**24
