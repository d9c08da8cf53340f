"""Extra arguments that know more than the gradients: a flag, and the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits, assert_same_types

import optax_lossscale as ls

RULE = ls.DynamicLossScale(growth_interval=3, hysteresis=2, init_scale=2.0**10)
PARAMS = {"w": jnp.arange(4.0), "b": jnp.ones(())}
GRADS = {"w": jnp.array([0.5, -1.0, 2.0, 0.25]), "b": jnp.float32(0.125)}
BAD_GRADS = {**GRADS, "w": GRADS["w"].at[2].set(jnp.nan)}
TX = ls.with_loss_scaling(optax.adam(0.1), RULE)


def update(grads, state, **extra_args):
    """The same, compiled and not."""
    compiled = jax.jit(TX.update)(grads, state, PARAMS, **extra_args)
    eager = TX.update(grads, state, PARAMS, **extra_args)
    assert_same_bits(eager[1].scale_state, compiled[1].scale_state)
    assert_same_types(compiled, eager)
    return compiled


@pytest.fixture
def state():
    return update(GRADS, TX.init(PARAMS))[1]


def assert_skipped(result, state):
    updates, new_state = result
    assert_no_update(updates)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert_same_types(new_state, state)


@pytest.mark.parametrize("flag", [False, np.False_, jnp.array(False)])
@pytest.mark.parametrize("grads", [GRADS, BAD_GRADS], ids=["good", "bad"])
def test_a_flag_that_is_false_skips_the_step_and_moves_the_scale(grads, flag, state):
    result = update(grads, state, grads_finite=flag)
    assert_skipped(result, state)
    assert_same_bits(result[1].scale_state, RULE.update(state.scale_state, False))


@pytest.mark.parametrize("flag", [True, jnp.array(True), None])
def test_a_flag_that_is_true_leaves_the_decision_to_the_gradients(flag, state):
    for grads in (GRADS, BAD_GRADS):
        with_flag = update(grads, state, grads_finite=flag)
        assert_same_bits(with_flag, update(grads, state))


@pytest.mark.parametrize("flag", [1.0, "yes", jnp.ones(2, bool), jnp.ones(())])
def test_what_is_no_flag_is_refused(flag, state):
    with pytest.raises(ValueError, match="`grads_finite` must be one boolean"):
        TX.update(GRADS, state, PARAMS, grads_finite=flag)


@pytest.mark.parametrize("value", [np.nan, jnp.float16(np.inf), jnp.float32(-np.inf)])
@pytest.mark.parametrize("grads", [GRADS, BAD_GRADS], ids=["good", "bad"])
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale(
    grads, value, state
):
    result = update(grads, state, value=value)
    assert_skipped(result, state)
    before, after = state.scale_state, result[1].scale_state
    assert_same_bits(after, before.record(False))
    assert int(before.growth_tracker) == 1 == int(after.growth_tracker)
    assert int(after.skipped_steps) == 1 == int(after.consecutive_skips)
    assert not after.grads_finite


def test_a_flag_that_is_false_beside_such_a_loss_leaves_the_scale_too(state):
    _, after = update(GRADS, state, value=np.nan, grads_finite=False)
    assert_same_bits(after.scale_state, state.scale_state.record(False))


@pytest.mark.parametrize("value", [3.0, jnp.float32(3.0), jnp.float16(65504), 7, None])
def test_a_finite_loss_leaves_the_decision_to_the_gradients(value, state):
    for grads in (GRADS, BAD_GRADS):
        assert_same_bits(update(grads, state, value=value), update(grads, state))


def test_a_rule_that_never_skips_hears_of_neither():
    rule = ls.FixedLossScale(8.0, skip_nonfinite=False)
    tx = ls.with_loss_scaling(optax.sgd(1.0), rule)
    updates, state = tx.update(
        GRADS, tx.init(PARAMS), PARAMS, grads_finite=False, value=jnp.nan
    )
    assert_same_bits(updates, jax.tree.map(jnp.negative, GRADS))
    assert_same_bits(state.scale_state, rule.init())


@pytest.mark.parametrize("chained", ["inside", "outside", "not"])
def test_all_but_the_flag_reach_the_inner_transformation_unchanged(chained):
    """The flag is meant for us: a line search would hand it to the loss."""
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx = ls.with_loss_scaling(optax.chain(inner) if chained == "inside" else inner)
    if chained == "outside":
        tx = optax.chain(optax.clip_by_global_norm(10.0), tx)
    value, value_fn = jnp.float32(3.0), (lambda p: 0.0)
    tx.update(
        *(GRADS, tx.init(PARAMS), PARAMS),
        **{"grads_finite": jnp.array(True), "value": value, "value_fn": value_fn},
    )
    assert seen == {"value": value, "value_fn": value_fn}


def test_a_transformation_that_names_one_of_them_is_given_that_one():
    seen = []

    def takes_value(updates, state, params=None, value=None):
        seen.append(value)
        return updates, state

    def takes_the_flag(updates, state, params=None, *, grads_finite, **extra_args):
        seen.append((grads_finite, *extra_args))
        return updates, state

    for update in (takes_value, takes_the_flag):
        inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
        tx = ls.with_loss_scaling(inner)
        tx.update(GRADS, tx.init(PARAMS), PARAMS, grads_finite=True, value=3.0)
    assert seen == [3.0, (True, "value")]


def test_a_type_error_of_the_inner_transformation_is_raised_once():
    """Also one that speaks of the flag: it is not taken for a refusal of it."""
    calls = []

    def update(updates, state, params=None, **extra_args):
        calls.append(1)
        raise TypeError("unrelated, but for 'grads_finite'")

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx = ls.with_loss_scaling(inner)
    with pytest.raises(TypeError, match="unrelated"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, grads_finite=True)
    assert calls == [1]


def test_transformations_that_take_neither_are_spared_them():
    """optax.contrib.sam takes one extra argument and refuses all others."""
    for inner in (
        optax.sgd(0.1),
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
    ):
        tx = ls.with_loss_scaling(inner)
        extra_args = {"grads_finite": True, "value": 1.0}
        tx.update(GRADS, tx.init(PARAMS), PARAMS, **extra_args)


@pytest.mark.slow
def test_a_line_search_is_spared_the_flag():
    """It hands all extra arguments to the loss, and refuses those it does not name."""
    tx = ls.with_loss_scaling(optax.lbfgs())
    params = jnp.array([1.0, 2.0])

    def value_fn(params):
        return jnp.sum(params**2)

    def step(value, flag):
        state = tx.init(params)
        return tx.update(
            2 * params,
            state,
            params,
            value=value,
            grad=2 * params,
            value_fn=value_fn,
            grads_finite=flag,
        )

    updates, state = jax.jit(step)(value_fn(params), True)
    assert jnp.any(updates) and state.scale_state.grads_finite
    for value, flag in ((value_fn(params), False), (jnp.nan, True)):
        updates, state = jax.jit(step)(value, flag)
        assert not jnp.any(updates) and not state.scale_state.grads_finite


@pytest.mark.parametrize("what", ["grads_finite", "value"])
def test_with_an_axis_name_one_member_decides_for_all(what):
    tx = ls.with_loss_scaling(optax.sgd(0.1), RULE, axis_name="member")
    params, grads = jnp.ones((2, 3)), jnp.ones((2, 3))
    given = {
        "grads_finite": jnp.array([True, False]),
        "value": jnp.array([1.0, jnp.nan]),
    }[what]
    state = jax.vmap(tx.init)(params)

    def member(grads, state, given):
        return tx.update(grads, state, **{what: given})

    updates, new_state = jax.vmap(member, axis_name="member")(grads, state, given)
    assert_no_update(updates)
    assert new_state.scale_state.grads_finite.tolist() == [False, False]
    allowance = new_state.scale_state.hysteresis_tracker.tolist()
    assert allowance == ([1, 1] if what == "grads_finite" else [2, 2])


def test_several_optimizers_skip_together():
    """As an actor and a critic might, each with a scale of its own."""
    other = ls.with_loss_scaling(optax.sgd(0.1), ls.FixedLossScale(8.0))
    state, other_state = TX.init(PARAMS), other.init(PARAMS)

    @jax.jit
    def step(state, other_state, grads, other_grads):
        flag = ls.all_finite((grads, other_grads))
        updates, state = TX.update(grads, state, PARAMS, grads_finite=flag)
        other_updates, other_state = other.update(
            other_grads, other_state, PARAMS, grads_finite=flag
        )
        return (updates, other_updates), (state, other_state)

    for pair in ((GRADS, BAD_GRADS), (BAD_GRADS, GRADS)):
        updates, states = step(state, other_state, *pair)
        assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
        for new_state in states:
            assert int(new_state.scale_state.skipped_steps) == 1


@pytest.mark.parametrize(
    "value", [jnp.ones(2), len, "abc", True, (1.0,), 1j, jnp.ones((), bool)], ids=str
)
def test_what_is_no_loss_is_refused(value, state):
    with pytest.raises(ValueError, match="`value` must be one real number of shape"):
        TX.update(GRADS, state, PARAMS, value=value)
