"""`with_loss_scaling` and `skip_nonfinite`: the state, and every kind of leaf."""

import functools
import inspect

import jax
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls

FLOATS = np.arange(4, dtype=np.float32)
PARAMS = {"w": FLOATS, "b": np.float32(1.0)}
ADAM = optax.adam(1e-3)


def test_transformation_is_of_optax_and_its_state_has_two_fields():
    tx = ls.with_loss_scaling(ADAM)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert tx.init(PARAMS)._fields == ("scale_state", "inner_state")
    assert_same_bits(tx.init(PARAMS).inner_state, ADAM.init(PARAMS))


def test_default_rule_is_dynamic():
    parameters = inspect.signature(ls.with_loss_scaling).parameters
    assert parameters["rule"].default == ls.DynamicLossScale()


@functools.partial(jax.jit, static_argnums=0)
def members_step(tx, grads):
    """The first step of members of an axis, each with a state and gradients."""
    return jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="i")(grads)


@pytest.mark.parametrize(
    "options",
    [{}, {"axis_name": "i"}, {"check_updates": True}],
    ids=["no options", "axis_name", "check_updates"],
)
def test_skip_nonfinite_is_a_rule_fixed_at_1(options):
    """For two members: one's update is inf, and the other's gradient NaN."""
    grads, inner = np.float32([[0.5, 3e38], [0.5, np.nan]]), optax.scale(2.0)
    step = members_step(ls.skip_nonfinite(inner, **options), grads)
    rule = ls.FixedLossScale(1.0)
    expected = members_step(ls.with_loss_scaling(inner, rule, **options), grads)
    assert_same_bits(step, expected)


def test_headroom_rule_sees_the_largest_gradient_of_all_members():
    rule = ls.HeadroomLossScale()
    tx = ls.with_loss_scaling(optax.identity(), rule, axis_name="i")
    _, states = members_step(tx, np.float32([1.0, 2.0**-10]))
    expected = rule.update(rule.init(), True, 1.0).loss_scale
    assert ls.get_loss_scale(states).tolist() == [expected] * 2


@pytest.mark.parametrize("tree", [{}, (), None], ids=str)
def test_empty_tree_is_a_step_like_any_other(tree):
    tx = ls.with_loss_scaling(ADAM)
    updates, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert updates == tree and ls.was_applied(state)


TABLE = {"w": FLOATS, "table": np.arange(3)}
MASKED = ls.with_loss_scaling(optax.masked(ADAM, {"w": True, "table": False}))


@pytest.mark.parametrize("factor", [1.0, np.nan], ids=["applied", "skipped"])
def test_update_of_an_integer_leaf_is_of_type_float0(factor):
    """As its gradient is, with ``allow_int``."""
    grads = {"w": factor * FLOATS, "table": np.zeros(3, jax.dtypes.float0)}
    updates, state = jax.jit(MASKED.update)(grads, MASKED.init(TABLE), TABLE)
    assert updates["table"].dtype == jax.dtypes.float0
    assert bool(ls.was_applied(state)) == np.isfinite(factor)


def test_closures_hold_only_hashable_values():
    """optimistix makes pytrees of them, which are compared."""
    internal = pytest.importorskip("equinox.internal")
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(0.1)))
    for function in (tx.init, tx.update):
        for leaf in jax.tree.leaves(internal.closure_to_pytree(function)):
            hash(leaf)
