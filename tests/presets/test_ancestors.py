"""What TensorFlow's and MindSpore's loss scales do, and what our tables say of it."""

import re

import jax.numpy as jnp
import optax
import pytest
from book import page, table

import optax_lossscale as ls

PARAMS = {"w": jnp.ones(3), "unused": None}
GRADS = {"w": jnp.array([1.0, -2.0, 3.0]), "unused": None}
INNER = optax.adam(0.1)


@pytest.mark.parametrize("name", ["mindspore", "keras_and_tensorflow"])
def test_code_in_the_tables_of_classes_runs(name):
    rule = ls.DynamicLossScale()
    tx = ls.with_loss_scaling(INNER, rule)
    opt_state = tx.init(PARAMS)
    names = {"ls": ls, "rule": rule, "tx": tx, "opt_state": opt_state, "grads": GRADS}
    names |= {"optimizer": INNER, "params": PARAMS, "state": rule.init(), "value": 8.0}
    names |= {"overflow": jnp.bool_(True), "finite_grads": jnp.bool_(True)}
    names |= {"optax": optax, "loss_fn": jnp.sum, "config": rule.get_config()}
    rows = table(page(f"coming_from/{name}"), "there")
    for class_name in ("FixedLossScaleManager", "LossScaleManager`"):
        assert class_name in str(rows)
    for *_, here in rows:
        expressions = re.findall(r"`([^`]+)`", here)
        assert expressions, here
        for expression in expressions:
            eval(expression, dict(names))
        for one, other in re.findall(r"`([^`]+)`, which is `([^`]+)`", here):
            assert eval(one, dict(names)) == eval(other, dict(names))
