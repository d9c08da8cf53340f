"""The code in our tables of what other systems have, row by row."""

import re

import numpy as np
import optax
import pytest
from book import page, run_blocks, table

import optax_lossscale as ls

RULE, INNER = ls.DynamicLossScale(), optax.sgd(0.1)
PARAMS = {"w": np.ones(3, np.float32), "unused": None}
TX, TRUE = ls.with_loss_scaling(INNER, RULE), np.bool_(True)
NAMES = {"ls": ls, "optax": optax, "rule": RULE, "config": RULE.get_config()}
NAMES |= {"optimizer": INNER, "tx": TX, "opt_state": TX.init(PARAMS), "params": PARAMS}
NAMES |= {"grads": PARAMS, "state": RULE.init(), "value": 8.0, "loss_fn": np.sum}
NAMES |= {"overflow": TRUE, "finite_grads": TRUE}


@pytest.mark.parametrize("name", ["mindspore", "keras_and_tensorflow"])
def test_code_in_the_tables_of_classes_runs(name):
    rows = table(page(f"coming_from/{name}"), "there")
    for class_name in ("FixedLossScaleManager", "LossScaleManager`"):
        assert class_name in str(rows)
    for *_, here in rows:
        code = re.findall(r"`([^`]+)`", here)
        same = re.findall(r"`([^`]+)`, which is `([^`]+)`", here)
        assert code, here
        code += [f"assert {one} == {other}" for one, other in same]
        run_blocks(code, name, dict(NAMES))


def test_code_in_the_table_of_systems_makes_rules():
    for _, rules, *_ in table(page("coming_from/index"), "system"):
        code = re.findall(r"`(ls\.[^`]+)`", rules)
        assert code, rules
        same = [f"assert isinstance({rule}, ls.LossScale)" for rule in code]
        run_blocks(same, "index", dict(NAMES))
