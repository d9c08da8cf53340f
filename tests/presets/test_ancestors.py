"""What TensorFlow's and MindSpore's loss scales do, and what our tables say of it."""

import re

import jax.numpy as jnp
import optax
import pytest
from book import page, table

import optax_lossscale as ls

RULE, INNER = ls.DynamicLossScale(), optax.adam(0.1)
PARAMS = {"w": jnp.ones(3), "unused": None}
TX, TRUE = ls.with_loss_scaling(INNER, RULE), jnp.bool_(True)
NAMES = {"ls": ls, "optax": optax, "rule": RULE, "config": RULE.get_config()}
NAMES |= {"optimizer": INNER, "tx": TX, "opt_state": TX.init(PARAMS), "params": PARAMS}
NAMES |= {"grads": PARAMS, "state": RULE.init(), "value": 8.0, "loss_fn": jnp.sum}
NAMES |= {"overflow": TRUE, "finite_grads": TRUE}


@pytest.mark.parametrize("name", ["mindspore", "keras_and_tensorflow"])
def test_code_in_the_tables_of_classes_runs(name):
    rows = table(page(f"coming_from/{name}"), "there")
    for class_name in ("FixedLossScaleManager", "LossScaleManager`"):
        assert class_name in str(rows)
    for *_, here in rows:
        expressions = re.findall(r"`([^`]+)`", here)
        assert expressions, here
        for expression in expressions:
            eval(expression, dict(NAMES))
        for one, other in re.findall(r"`([^`]+)`, which is `([^`]+)`", here):
            assert eval(one, dict(NAMES)) == eval(other, dict(NAMES))
