"""What TensorFlow's and MindSpore's loss scales do, and what our tables say of it."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from every_rule import PRESETS
from helpers import assert_same_bits, page, run_rule, table

import optax_lossscale as ls
from optax_lossscale import presets

PARAMS = {"w": jnp.ones(3), "unused": None}
GRADS = {"w": jnp.array([1.0, -2.0, 3.0]), "unused": None}
BAD_GRADS = {"w": jnp.array([1.0, jnp.inf, 3.0]), "unused": None}
INNER = optax.adam(0.1)
PAGE = page("coming_from/index")


def not_dropping(loss_scale):
    return presets.mindspore_fixed(loss_scale, drop_overflow_update=False)


FIXED = {
    "mindspore": (presets.mindspore_fixed, True),
    "mindspore, not dropping": (not_dropping, False),
    "tensorflow": (presets.tf_fixed_loss_scale, False),
    "tf.contrib": (presets.tf_contrib_fixed, True),
}


@pytest.mark.parametrize(("preset", "drops"), FIXED.values(), ids=FIXED)
def test_a_fixed_scale_is_constant_and_drops_overflows_or_not(preset, drops):
    rule = preset(128.0)
    assert rule.skip_nonfinite is drops  # get_drop_overflow_update()
    assert set(run_rule(rule, [True, False, False]).loss_scale) == {128.0}
    tx = ls.with_loss_scaling(INNER, rule)
    opt_state = tx.init(PARAMS)
    scale = ls.get_loss_scale(opt_state)  # get_loss_scale()
    assert (scale.shape, scale.dtype) == ((), jnp.float32)
    for grads, applied in ((GRADS, True), (BAD_GRADS, not drops)):
        updates, new_state = tx.update(grads, opt_state, PARAMS)
        should_apply = ls.get_loss_scale_state(new_state).grads_finite
        assert bool(should_apply) is bool(jnp.any(updates["w"] != 0)) is applied
        assert updates["unused"] is None
    loss, grads = ls.value_and_grad(lambda p: jnp.sum(p["w"] ** 2), opt_state)(PARAMS)
    scaled_grads = jax.tree.map(lambda g: 128 * g, grads)
    assert_same_bits((loss, grads["w"]), (jnp.float32(3), 2 * PARAMS["w"]))
    assert_same_bits(ls.unscale_grads(scaled_grads, opt_state), grads)
    with pytest.raises(ValueError, match="must be a number from 1"):
        preset(0.999)


def test_more_than_a_thousand_overflows_in_a_row_raise():
    state = presets.mindspore_dynamic().init()
    state = state._replace(consecutive_skips=jnp.int32(1000))
    ls.check_loss_scale(state, max_consecutive_skips=1000)
    state = presets.mindspore_dynamic().update(state, False)
    with pytest.raises(RuntimeError, match="The last 1001 steps were all skipped"):
        ls.check_loss_scale(state, max_consecutive_skips=1000)


def test_what_the_table_of_classes_writes_as_code_runs():
    rule = ls.DynamicLossScale()
    tx = ls.with_loss_scaling(INNER, rule)
    opt_state = tx.init(PARAMS)
    names = {"ls": ls, "rule": rule, "tx": tx, "opt_state": opt_state, "grads": GRADS}
    names |= {"optimizer": INNER, "params": PARAMS, "state": rule.init(), "value": 8.0}
    names |= {"overflow": jnp.bool_(True), "finite_grads": jnp.bool_(True)}
    names |= {"optax": optax, "loss_fn": jnp.sum, "config": rule.get_config()}
    classes = PAGE.split("## TensorFlow and MindSpore, class by class\n")[1]
    rows = table(classes, "there")
    assert len(rows) == 34
    for *_, here in rows:
        expressions = re.findall(r"`([^`]+)`", here)
        assert expressions, here
        for expression in expressions:
            eval(expression, dict(names))
        for one, other in re.findall(r"`([^`]+)`, which is `([^`]+)`", here):
            assert eval(one, dict(names)) == eval(other, dict(names))


def test_the_table_has_every_method_of_the_managers_and_cells():
    rows = table(PAGE.split("class by class\n")[1], "there")
    theirs = " ".join(there for there, *_ in rows)
    for method in (
        *("get_loss_scale()", "update_loss_scale(overflow)", "get_update_cell()"),
        *("get_drop_overflow_update()", "update_loss_scale(finite_grads)"),
        *("set_sense_scale(sens)", "process_loss_scale(overflow)"),
        *("start_overflow_check", "get_overflow_status", "FixedLossScaleUpdateCell("),
        *("TrainOneStepWithLossScaleCell(", "nn.Momentum(", "get_config()"),
    ):
        assert method in theirs, method


def test_an_overflow_there_is_a_step_that_is_not_finite_here():
    rule = presets.mindspore_dynamic(1024.0)
    for overflow, scale in ((True, 512.0), (False, 1024.0)):
        state = rule.update(rule.init(), ~jnp.bool_(overflow))
        assert float(state.loss_scale) == scale


def test_every_preset_is_in_the_tables_of_systems_and_departures():
    cells = " ".join(row[1] for row in table(PAGE, "system"))
    assert sorted(re.findall(r"presets\.(\w+)", cells)) == sorted(PRESETS)
    for expression in re.findall(r"`(ls\.presets\.[^`]+\))`", cells):
        assert isinstance(eval(expression, {"ls": ls}), ls.LossScale)
    rows = table(PAGE, "preset")
    assert sorted(name.strip("`") for name, *_ in rows) == sorted(PRESETS)
    for name, source, departures in rows:
        assert "](https://" in source and departures.endswith("."), name
