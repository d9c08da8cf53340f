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


PAGES = {"mindspore": "MindSpore", "keras_and_tensorflow": "TensorFlow"}
TABLES = [table(page(f"coming_from/{name}"), PAGES[name]) for name in PAGES]
of_classes = pytest.mark.parametrize("rows", TABLES, ids=PAGES)


@of_classes
def test_table_of_classes_has_the_managers(rows):
    names = re.findall(r"`(\w+)", " ".join(there for there, *_ in rows))
    assert {"FixedLossScaleManager", "LossScaleManager"} <= {*names}


@of_classes
def test_code_in_the_table_of_classes_runs(rows):
    for *_, here in rows:
        code = re.findall(r"`([^`]+)`", here)
        assert code, here
        run_blocks(code, here, dict(NAMES))


@of_classes
def test_preset_is_the_rule_that_the_table_says_it_is(rows):
    said = [re.search(r"`([^`]+)`, which is `([^`]+)`", here) for *_, here in rows]
    same = [f"assert {found[1]} == {found[2]}" for found in said if found]
    assert same
    run_blocks(same, "table", dict(NAMES))


def test_code_in_the_table_of_systems_makes_rules():
    for _, rules, *_ in table(page("coming_from/index"), "system"):
        code = re.findall(r"`(ls\.[^`]+)`", rules)
        assert code, rules
        same = [f"assert isinstance({rule}, ls.LossScale)" for rule in code]
        run_blocks(same, "index", dict(NAMES))
