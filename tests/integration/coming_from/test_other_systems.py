"""The page of the other systems: its rules exist, its program resumes a run."""

import functools
import re

import jax
import numpy as np
import optax
from asserts import assert_same_bits
from book import PAGES, page, run_page, table
from every_rule import PRESETS

import optax_lossscale as ls


@functools.cache
def run():
    return run_page(PAGES / "coming_from/index.md")


def test_every_preset_is_in_the_table_of_systems():
    cells = " ".join(row[1] for row in table(page("coming_from/index"), "system"))
    assert sorted(re.findall(r"presets\.(\w+)", cells)) == sorted(PRESETS)
    for expression in re.findall(r"`(ls\.[^`]+)`", cells):
        assert isinstance(eval(expression, {"ls": ls}), ls.LossScale)


def test_the_run_begun_there_goes_on_here():
    """The next finite step is one that grows, and a bad one changes the scale alone."""
    tx, state, params = run()["tx"], run()["resumed_state"], run()["half_params"]

    @jax.jit
    def step(x, y):
        fun = ls.value_and_grad(ls.autocast(run()["loss_fn"]), state)
        updates, new_state = tx.update(fun(params, (x, y))[1], state, params)
        return optax.apply_updates(params, updates), new_state

    x, y = run()["batch"]
    trained, good = step(x, y)
    assert ls.was_applied(good) and not np.array_equal(trained["w"], params["w"])
    assert ls.get_loss_scale(good) == 32768.0
    kept, bad = step(x.at[0, 0].set(1e6), y)  # too much for float16 alone
    assert not ls.was_applied(bad)
    assert_same_bits((kept, bad.inner_state), (params, state.inner_state))
    assert ls.get_loss_scale(bad) == 8192.0
