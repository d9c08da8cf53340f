"""Lines that a train step forgets or has twice are told, whatever ran before.

Random programs follow each other in one process: right ones, which nothing is said of,
and wrong ones, which are told at their first step.
"""

import random
import traceback
import warnings

import pytest
from random_programs import (
    ADAM,
    APART,
    NOT_SCALED,
    OTHERS,
    Network,
    by_value_and_grad,
    loss_fn,
    random_programs,
)
from shared import slow_but

import optax_lossscale as ls

pytestmark = pytest.mark.usefixtures("new_process")


def warned(program):
    """All warnings, and the error if one is raised."""
    errors = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            program()
        except Exception:
            errors = [traceback.format_exc()]
    return [str(w.message) for w in seen] + errors


@pytest.mark.parametrize("program", [*APART, *OTHERS])
def test_right_programs_are_silent_by_themselves(program):
    assert warned(lambda: program(Network(4, ADAM), by_value_and_grad)) == []


def test_gradient_function_built_once_is_told_at_second_step():
    """The first step is right."""
    net = Network(4, ADAM)
    fun = ls.grad(loss_fn, net.state)

    def train():
        params, state, x = net.args
        for _ in range(2):
            params, state = net.apply(params, state, fun(params, x))

    assert [text[: len(NOT_SCALED)] for text in warned(train)] == [NOT_SCALED]


@pytest.mark.parametrize("seed", slow_but(range(20), range(100)))
def test_random_programs_are_told_of_if_wrong_and_only_then(seed):
    names = []
    for name, run, expected in random_programs(random.Random(seed)):
        names.append(name)
        seen = [text for text in warned(run) if "float32 copies" not in text]
        told = [text[: len(expected[0])] for text in seen] if expected else seen
        assert told == expected, f"seed {seed}: {names}"
