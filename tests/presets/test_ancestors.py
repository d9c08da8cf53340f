"""What TensorFlow's and MindSpore's loss scales do, and what our tables say of it."""

import re

import jax.numpy as jnp
import optax
from book import page, table
from every_rule import PRESETS

import optax_lossscale as ls

PARAMS = {"w": jnp.ones(3), "unused": None}
GRADS = {"w": jnp.array([1.0, -2.0, 3.0]), "unused": None}
INNER = optax.adam(0.1)
PAGE = page("coming_from/index")


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
    for name in ("FixedLossScale", "FixedLossScaleManager", "DynamicLossScaleManager"):
        assert f"`{name}" in str(rows)
    for *_, here in rows:
        expressions = re.findall(r"`([^`]+)`", here)
        assert expressions, here
        for expression in expressions:
            eval(expression, dict(names))
        for one, other in re.findall(r"`([^`]+)`, which is `([^`]+)`", here):
            assert eval(one, dict(names)) == eval(other, dict(names))


def test_every_preset_is_in_the_tables_of_systems_and_departures():
    cells = " ".join(row[1] for row in table(PAGE, "system"))
    assert sorted(re.findall(r"presets\.(\w+)", cells)) == sorted(PRESETS)
    for expression in re.findall(r"`(ls\.presets\.[^`]+\))`", cells):
        assert isinstance(eval(expression, {"ls": ls}), ls.LossScale)
    rows = table(PAGE, "preset")
    names = sorted(name.strip("`") for name, *_ in rows)
    assert names == sorted([*PRESETS, "FixedLossScale"])
    for name, source, departures in rows:
        assert "](https://" in source and departures.endswith("."), name
