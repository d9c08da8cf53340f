"""Extra arguments that know more than the gradients: a flag, and the loss."""

import jax
import jax.numpy as jnp
import optax
import pytest
from asserts import assert_no_update, assert_same_bits

import optax_lossscale as ls

RULE = ls.DynamicLossScale(growth_interval=3, hysteresis=2, init_scale=2.0**10)
PARAMS = {"w": jnp.arange(4.0), "b": jnp.ones(())}
GRADS = {"w": jnp.array([0.5, -1.0, 2.0, 0.25]), "b": jnp.float32(0.125)}
BAD_GRADS = {**GRADS, "w": GRADS["w"].at[2].set(jnp.nan)}
TX = ls.with_loss_scaling(optax.adam(0.1), RULE)


@pytest.mark.parametrize(
    ("name", "rule", "values"),
    [
        ("grads_finite", "boolean", [1.0, "yes", jnp.ones(2, bool)]),
        ("value", "real number", [jnp.ones(2), True, 1j]),
    ],
)
def test_what_is_no_flag_or_no_loss_is_refused(name, rule, values):
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be one {rule}"):
            TX.update(GRADS, TX.init(PARAMS), PARAMS, **{name: value})


def test_a_rule_that_never_skips_ignores_the_flag_and_the_loss():
    rule, inner = ls.FixedLossScale(8.0, skip_nonfinite=False), optax.adam(1.0)
    tx = ls.with_loss_scaling(inner, rule)
    given = {"grads_finite": False, "value": jnp.nan}
    updates, state = tx.update(BAD_GRADS, tx.init(PARAMS), PARAMS, **given)
    expected = inner.update(BAD_GRADS, inner.init(PARAMS), PARAMS)
    assert_same_bits((updates, state.inner_state), expected)
    assert_same_bits(state.scale_state, rule.init())


SEEN = {}


def takes_all(updates, state, params=None, **extra_args):
    SEEN.update(extra_args)
    return updates, state


def takes_value(updates, state, params=None, value=None):
    SEEN.update(value=value)
    return updates, state


def takes_the_flag(updates, state, params=None, *, grads_finite, **extra_args):
    SEEN.update(extra_args, grads_finite=grads_finite)
    return updates, state


def inner_of(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    ("takes", "taken"),
    [
        # The flag is meant for us: a line search would hand it to the loss.
        (takes_all, ["value", "value_fn"]),
        (takes_value, ["value"]),
        (takes_the_flag, ["grads_finite", "value", "value_fn"]),
    ],
)
def test_a_transformation_is_given_what_it_takes(takes, taken):
    given = {"grads_finite": True, "value": jnp.float32(3.0), "value_fn": len}
    tx = ls.with_loss_scaling(inner_of(takes))
    SEEN.clear()
    tx.update(GRADS, tx.init(PARAMS), PARAMS, **given)
    assert SEEN.keys() == set(taken)


SAM = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))


@pytest.mark.parametrize(
    "inner",
    [optax.chain(optax.clip(1.0), SAM), optax.MultiSteps(SAM, 2)],
    ids=["chain", "MultiSteps"],
)
def test_the_loss_decides_beside_an_optimizer_that_does_not_take_it(inner):
    tx = ls.with_loss_scaling(inner)
    state = tx.init(PARAMS)
    for step in (tx.update, jax.jit(tx.update)):
        assert_same_bits(
            step(GRADS, state, PARAMS, value=3.0), step(GRADS, state, PARAMS)
        )
        _, skipped = step(GRADS, state, PARAMS, value=jnp.nan)
        assert not ls.was_applied(skipped)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        tx.update(GRADS, state, PARAMS, value=3.0, other=3.0)


def test_with_an_axis_name_one_member_decides_for_all():
    tx = ls.with_loss_scaling(optax.sgd(0.1), RULE, axis_name="member")

    def member(grads):
        return tx.update(grads, tx.init(grads))

    grads = jnp.ones((2, 3)).at[1, 2].set(jnp.inf)
    updates, state = jax.vmap(member, axis_name="member")(grads)
    assert_no_update(updates)
    assert state.scale_state.hysteresis_tracker.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["loss", "values"])
def test_an_argument_that_is_nearly_one_that_decides_is_warned_of(name):
    tx = ls.with_loss_scaling(optax.adam(0.1))
    state = tx.init(jnp.ones(2))
    with pytest.warns(UserWarning, match=f"Pass `value={name}` if it should"):
        tx.update(jnp.ones(2), state, **{name: 1.0})
    tx.update(jnp.ones(2), state, value=1.0, **{name: 1.0})

    def update(updates, state, params=None, *, loss, values):
        return updates, state

    tx = ls.with_loss_scaling(inner_of(update))
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), loss=1.0, values=2.0)


def test_closures_hold_nothing_that_cannot_be_hashed():
    """optimistix makes pytrees of them, which are compared."""
    internal = pytest.importorskip("equinox.internal")
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(0.1)))
    for function in (tx.init, tx.update):
        for leaf in jax.tree.leaves(internal.closure_to_pytree(function)):
            hash(leaf)
