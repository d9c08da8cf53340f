"""Lines that a train step forgets or has twice are told, whatever ran before.

Random programs follow each other in one process: a wrong one, which is told at its
first step, and right ones, of which nothing is said.
"""

import concurrent.futures
import functools
import gc
import random
import traceback
import warnings
import weakref

import jax
import optax
import pytest
from random_programs import (
    ADAM,
    APART,
    NOT_SCALED,
    OTHERS,
    Network,
    by_hand,
    by_value_and_grad,
    raised,
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


def test_a_loss_that_raised_leaves_nothing_behind():
    [text] = warned(lambda: raised(Network(4, ADAM), None))
    assert text.startswith(NOT_SCALED)
    assert warned(lambda: in_jit_right(Network(4, ADAM))) == []


def test_a_right_step_hides_no_wrong_one_of_a_model_with_other_names():
    net = Network(4, ADAM)
    in_jit_right(net)
    params = {"kernel": net.x, "bias": net.x}
    [text] = warned(
        lambda: jax.eval_shape(net.apply, params, net.tx.init(params), params)
    )
    assert text.startswith(NOT_SCALED)


def test_the_static_data_of_a_model_is_freed():
    """Of an eager step. JAX itself keeps that of a compiled one."""

    def run():
        net, static = Network(4, optax.sgd(0.1, momentum=0.9)), lambda w: w
        net.params = jax.tree_util.Partial(static, net.x)
        net.state = net.tx.init(net.params)
        grads = ls.grad(lambda params: params().sum(), net.state)(net.params)
        net.tx.update(grads, net.state, net.params)
        return weakref.ref(static)

    static = run()
    gc.collect()
    assert static() is None


def in_jit_right(net):
    jax.eval_shape(functools.partial(net.step, by_value_and_grad), *net.args)


def test_threads_do_not_disturb_each_other():
    """They share one state, whose notes all of them write."""
    net = Network(4, ADAM)

    def train(_):
        for _ in range(5):
            grads, _ = by_hand(*net.args)
            net.apply(net.params, net.state, grads)

    def run():
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(train, range(8)))

    assert warned(run) == []


@pytest.mark.parametrize("seed", slow_but(range(20), range(100)))
def test_random_programs_are_told_of_if_wrong_and_only_then(seed):
    names = []
    for name, run, expected in random_programs(random.Random(seed)):
        names.append(name)
        seen = [text for text in warned(run) if "float32 copies" not in text]
        told = [text[: len(expected[0])] for text in seen] if expected else seen
        assert told == expected, f"seed {seed}: {names}"
