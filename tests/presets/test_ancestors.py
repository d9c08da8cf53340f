"""What TensorFlow's and MindSpore's loss scales do, row by row of our table."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, page, table

import optax_lossscale as ls
from optax_lossscale import presets

PARAMS = {"w": jnp.ones(3), "unused": None}
GRADS = {"w": jnp.array([1.0, -2.0, 3.0]), "unused": None}
BAD_GRADS = {"w": jnp.array([1.0, jnp.inf, 3.0]), "unused": None}
INNER = optax.adam(0.1)


def step(rule, grads):
    tx = ls.with_loss_scaling(INNER, rule)
    return tx.update(grads, tx.init(PARAMS), PARAMS)


def applied(rule, grads):
    """Whether the parameters move at all; a NaN moves them."""
    updates, _ = step(rule, grads)
    return bool(jnp.any(updates["w"] != 0))


FIXED = {
    "mindspore": (presets.mindspore_fixed, True),
    "mindspore, not dropping": (
        lambda scale=128.0: presets.mindspore_fixed(scale, drop_overflow_update=False),
        False,
    ),
    "tensorflow": (presets.tf_fixed_loss_scale, False),
    "tf.contrib": (presets.tf_contrib_fixed, True),
}
fixed_rules = pytest.mark.parametrize(("make", "drops"), FIXED.values(), ids=FIXED)


@fixed_rules
def test_a_fixed_scale_is_constant_and_drops_overflows_or_not(make, drops):
    rule = make(128.0)
    assert rule.skip_nonfinite is drops  # get_drop_overflow_update()
    assert applied(rule, GRADS)
    assert applied(rule, BAD_GRADS) is not drops
    state = rule.init()
    for overflow in (False, True, True):  # update_loss_scale(overflow) does nothing
        state = rule.update(state, not overflow)
        scale = ls.get_loss_scale(state)  # get_loss_scale()
        assert (scale.shape, scale.dtype, float(scale)) == ((), jnp.float32, 128.0)


@fixed_rules
@pytest.mark.parametrize("value", [0.999, 0, -1, "128", None, True])
def test_a_fixed_scale_below_one_or_no_number_is_refused(make, drops, value):
    with pytest.raises(ValueError, match="must be a number from 1"):
        make(value)


def test_mindspores_defaults():
    assert presets.mindspore_fixed() == ls.FixedLossScale(128.0, skip_nonfinite=True)
    assert presets.mindspore_fixed() == ls.FixedLossScale()
    dynamic = presets.mindspore_dynamic()
    assert (dynamic.init_scale, dynamic.growth_factor) == (2.0**24, 2.0)
    assert (dynamic.growth_interval, dynamic.min_scale) == (2000, 1.0)


def test_without_dropping_there_is_no_update_cell():
    """Nothing is checked and nothing masked: gradients go to the optimizer as such."""
    rule = presets.mindspore_fixed(drop_overflow_update=False)
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
    state = tx.init(PARAMS)
    program = str(jax.make_jaxpr(lambda g: tx.update(g, state, PARAMS)[0])(GRADS))
    plain = optax.sgd(0.1)
    plain_state = plain.init(PARAMS)
    expected = jax.make_jaxpr(lambda g: plain.update(g, plain_state, PARAMS)[0])(GRADS)
    assert re.findall(r"(select_n|dot_general|reduce\w+)\[", program) == re.findall(
        r"(select_n|dot_general|reduce\w+)\[", str(expected)
    )


def test_gradients_are_divided_with_or_without_dropping():
    def loss_fn(w):
        return jnp.sum(w**2)

    for drop in (True, False):
        rule = presets.mindspore_fixed(1024.0, drop_overflow_update=drop)
        tx = ls.with_loss_scaling(INNER, rule)
        opt_state = tx.init(PARAMS["w"])
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(PARAMS["w"])
        assert_same_bits((loss, grads), (jnp.float32(3), 2 * PARAMS["w"]))
        scaled = jax.grad(lambda w, s=opt_state: ls.scale_loss(loss_fn(w), s))
        assert_same_bits(ls.unscale_grads(scaled(PARAMS["w"]), opt_state), grads)


def test_the_manager_to_derive_from():
    assert inspect.isabstract(ls.LossScale)
    assert {"init", "update"} == ls.LossScale.__abstractmethods__


def test_mindspores_dynamic_manager():
    rule = presets.mindspore_dynamic(8.0, scale_factor=4, scale_window=3)
    scales, state = [], rule.init()
    for overflow in (0, 0, 0, 1, 0, 0, 1, 1, 1, 1):
        state = rule.update(state, not overflow)
        scales.append(float(state.loss_scale))
    assert scales == [8, 8, 32, 8, 8, 8, 2, 1, 1, 1]


def test_more_than_a_thousand_overflows_in_a_row_raise():
    rule = presets.mindspore_dynamic()

    @jax.jit
    def overflows(state):
        return jax.lax.fori_loop(0, 1000, lambda _, s: rule.update(s, False), state)

    state = overflows(rule.init())
    ls.check_loss_scale(state, max_consecutive_skips=1000)
    state = rule.update(state, False)
    with pytest.raises(RuntimeError, match="The last 1001 steps were all skipped"):
        ls.check_loss_scale(state, max_consecutive_skips=1000)
    ls.check_loss_scale(rule.update(state, True), max_consecutive_skips=1000)


def test_update_of_tensorflow_tells_whether_to_apply():
    """``update(grads)``: gradients unscaled already, those that are None ignored."""
    for grads, should_apply in ((GRADS, True), (BAD_GRADS, False)):
        updates, opt_state = step(presets.tf_dynamic_loss_scale(), grads)
        assert bool(ls.get_loss_scale_state(opt_state).grads_finite) is should_apply
        assert updates["unused"] is None
    _, opt_state = step(presets.tf_dynamic_loss_scale(), BAD_GRADS)
    assert float(ls.get_loss_scale(opt_state)) == 2.0**14


PAGE = page("coming_from/index")


def test_what_the_table_writes_as_code_runs():
    rule = ls.DynamicLossScale()
    tx = ls.with_loss_scaling(INNER, rule)
    opt_state = tx.init(PARAMS)
    names = {
        "ls": ls,
        "rule": rule,
        "tx": tx,
        "opt_state": opt_state,
        "optimizer": INNER,
        "params": PARAMS,
        "grads": GRADS,
        "state": rule.init(),
        "value": 8.0,
        "grads_finite": True,
        "config": rule.get_config(),
    }
    classes = PAGE.split("## TensorFlow and MindSpore, class by class\n")[1]
    rows = table(classes, "there")
    assert len(rows) == 12
    for row in rows:
        expressions = re.findall(r"`([^`]+)`", row[-1])
        assert expressions, row
        for expression in expressions:
            eval(expression, dict(names))


def test_the_table_of_systems_names_every_preset():
    rows = table(PAGE, "system")
    named = {name for row in rows for name in re.findall(r"presets\.(\w+)", row[1])}
    assert named == {
        name
        for name, _ in inspect.getmembers(presets, inspect.isfunction)
        if not name.startswith("_") and not name.endswith("_state_dict")
    }
    for row in rows:
        for expression in re.findall(r"`(ls\.presets\.[^`]+\))`", row[1]):
            assert isinstance(eval(expression, {"ls": ls}), ls.LossScale)


def test_a_scale_of_numpys_or_of_tensorflows_kind_is_a_number_too():
    assert presets.tf_fixed_loss_scale(np.float32(8)) == ls.FixedLossScale(
        8.0, skip_nonfinite=False
    )
