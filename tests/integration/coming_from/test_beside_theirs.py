"""Flax and jmp run beside the programs that replace them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from guides import TRAININGS, run, run_theirs
from helpers import assert_close, assert_same_bits

import optax_lossscale as ls

pytestmark = pytest.mark.slow


def batches(page, steps):
    """Good ones, one that is infinite, and one that overflows in float16."""
    x = np.array(page["x"][:steps])
    x[3], x[5] = np.inf, 2e4 * x[5]
    return map(jnp.asarray, x)


def flax_states(steps):
    """Parameters, optimizer state, loss and scale of every step, there and here."""

    def start(page, **fields):
        state, model = page["state"], page["MLP"]()
        params = model.init(jax.random.key(0), page["x"][0])
        return type(state).create(
            apply_fn=model.apply, params=params, tx=state.tx, **fields
        )

    theirs, ours = run_theirs("flax_dynamic_scale"), run("flax_dynamic_scale")
    there = start(theirs, dynamic_scale=DynamicScale(growth_interval=50))
    here = start(ours)
    for x in batches(ours, steps):
        there, their_loss = theirs["train_step"](there, x)
        here, loss = ours["train_step"](here, x)
        yield (
            (there.params, there.opt_state, their_loss, there.dynamic_scale.scale),
            (here.params, here.opt_state.inner_state, loss, ls.get_loss_scale(here)),
        )


def jmp_states(steps):
    theirs, ours = run_theirs("jmp"), run("jmp")
    params = jax.tree.map(lambda p: p / 2, ours["params"])
    scale = theirs["jmp"].DynamicLossScale(jnp.float32(2**15), period=50)
    there = params, theirs["tx"].init(params), scale
    here = params, ours["tx"].init(params)
    for x in batches(ours, steps):
        *there, their_loss = theirs["train_step"](*there, x)
        *here, loss = ours["train_step"](*here, x)
        yield (
            (*there[:2], their_loss, there[2].loss_scale),
            (here[0], here[1].inner_state, loss, ls.get_loss_scale(here)),
        )


both = pytest.mark.parametrize("states", [flax_states, jmp_states])


@both
def test_compiled_programs_take_the_same_course(states):
    course = list(states(60))
    for theirs, ours in course:
        assert theirs[-1] == ours[-1]
    scales = np.array([float(ours[-1]) for _, ours in course])
    changes = np.log2(scales[1:] / scales[:-1])
    assert list(changes[changes != 0]) == [-1, -1, 1] and changes[2] == changes[4] == -1
    # XLA fuses and rounds differently.
    theirs, ours = course[-1]
    np.testing.assert_allclose(ours[2], theirs[2], rtol=0.02)
    assert_close(ours[0], theirs[0], rtol=1e-7, atol=2e-3)


@both
def test_uncompiled_programs_are_the_same_bit_for_bit(states):
    next(states(6))  # the programs of the pages are compiled
    with jax.disable_jit():
        for theirs, ours in states(8):
            assert_same_bits(ours[:3], theirs[:3])


def test_flax_on_many_devices_and_ours_do_the_same():
    theirs = run_theirs("flax_dynamic_scale", programs=2)
    (training,) = (t for t in TRAININGS if t.state == ("parallel_state",))
    start = theirs["parallel_state"]
    for bad in (False, True):
        (x,) = training.data(bad)
        there, their_loss = theirs["parallel_step"](start, np.reshape(x, (8, -1, 8)))
        here, loss = run(training.guide)[training.name](*training.start(), x)
        scale = float(ls.get_loss_scale(here))
        np.testing.assert_array_equal(there.dynamic_scale.scale, [scale] * 8)
        if bad:
            assert_same_bits(there.params, start.params)
        else:
            np.testing.assert_allclose(np.mean(their_loss), loss, rtol=0.02)
