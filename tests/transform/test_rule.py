"""How the transformation calls the rule, and what it refuses of one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_types

import optax_lossscale as ls

PARAMS = {"w": jnp.arange(4.0), "b": jnp.ones(())}


GRADS = {"w": jnp.array([0.5, -1.0, 2.0, 0.25]), "b": jnp.float32(0.125)}


@pytest.mark.parametrize(
    "rule", [128.0, ls.DynamicLossScale, "dynamic", None, optax.sgd(0.1)]
)
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(TypeError, match="`loss_scale` must be a rule.*FixedLossScale"):
        ls.with_loss_scaling(optax.sgd(0.1), rule)


def test_the_types_of_the_scale_state_hold_whatever_a_rule_returns():
    @dataclasses.dataclass(frozen=True)
    class Careless(ls.LossScale):
        def init(self):
            return ls.LossScaleState.create(8.0)

        def update(self, state, grads_finite):
            state = state.record(grads_finite)
            return state._replace(growth_tracker=0, loss_scale=jnp.asarray(4.0))

    tx = ls.with_loss_scaling(optax.sgd(0.1), Careless())
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        _, new_state = update(GRADS, state, PARAMS)
        assert_same_types(new_state, state)
        assert float(ls.get_loss_scale(new_state)) == 4.0


def test_the_state_of_another_rule_is_refused_with_the_way_to_go_on():
    params = jnp.ones(2)
    headroom = ls.HeadroomLossScale()
    old = ls.with_loss_scaling(optax.adam(1e-3)).init(params)
    tx = ls.with_loss_scaling(optax.adam(1e-3), headroom)
    with pytest.raises(ValueError, match="^`state` must hold the state of Headroom"):
        jax.jit(tx.update)(params, old, params)
    opt_state = old._replace(scale_state=headroom.init())
    _, opt_state = jax.jit(tx.update)(params, opt_state, params)
    assert int(opt_state.inner_state[0].count) == 1
    # The other way round nothing is missing: what is remembered stays.
    tx = ls.with_loss_scaling(optax.adam(1e-3))
    _, after = jax.jit(tx.update)(params, opt_state, params)
    assert after.scale_state.rule_state == opt_state.scale_state.rule_state


def test_a_rule_that_changes_the_structure_of_its_state_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Forgetful(ls.LossScale):
        def init(self):
            return ls.LossScaleState.create(1.0, rule_state=(jnp.zeros(()),))

        def update(self, state, grads_finite):
            return ls.LossScaleState.create(1.0)

    tx = ls.with_loss_scaling(optax.sgd(0.1), Forgetful())
    with pytest.raises(ValueError, match="`loss_scale` must have an `update` that"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


@pytest.mark.parametrize("made", [None, 8.0, (), jnp.ones(())])
def test_a_rule_whose_init_returns_no_state_is_refused(made):
    @dataclasses.dataclass(frozen=True)
    class Stateless(ls.LossScale):
        def init(self):
            return made

        def update(self, state, grads_finite):
            return state

    tx = ls.with_loss_scaling(optax.sgd(0.1), Stateless())
    with pytest.raises(TypeError, match="`init` that returns a LossScaleState, got"):
        tx.init(PARAMS)


def test_a_rule_that_changes_a_shape_of_its_state_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Growing(ls.LossScale):
        def init(self):
            return ls.LossScaleState.create(1.0, rule_state=jnp.zeros(1))

        def update(self, state, grads_finite):
            return state._replace(rule_state=jnp.append(state.rule_state, 1.0))

    tx = ls.with_loss_scaling(optax.sgd(0.1), Growing())
    with pytest.raises(ValueError, match=r"the shapes of the state, got .*\(2,\) for"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


RULES = [
    ls.DynamicLossScale(init_scale=2.0**17),
    ls.FixedLossScale(2.0**17),
    ls.HeadroomLossScale(init_scale=2.0**17),
    ls.LogNormalLossScale(init_scale=2.0**17),
    ls.TolerantLossScale(init_scale=2.0**17),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    "number",
    [
        *(8, 0, np.float16(np.inf), "half"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (8.0, -1, np.nan)),
    ],
)
def test_whatever_number_is_put_into_the_state_the_run_goes_on_in_float32(rule, number):
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
