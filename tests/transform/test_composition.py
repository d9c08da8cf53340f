"""The wrapper among Optax's other wrappers."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from optax import contrib

import optax_lossscale as ls

PARAMS = {"w": np.float32([1.0, -2.0, 3.0]), "b": np.float32(0.5)}
GOOD = {"w": np.float32([3.0, -4.0, 0.0]), "b": np.float32(0.0)}
BAD = {**GOOD, "b": np.float32(np.nan)}
MASK, REST = {"w": True, "b": False}, {"w": False, "b": True}
SGD, ADAM, CLIP = optax.sgd(0.1), optax.adam(0.1), optax.clip_by_global_norm(1.0)
SCALED = ls.with_loss_scaling(SGD)


@functools.cache
def jitted_step(tx):
    @jax.jit
    def step(params, state, grads, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def start_for(name):
    return optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS


def run(tx, sequence, params=PARAMS, **extra_args):
    state = tx.init(params)
    for grads in sequence:
        params, state = jitted_step(tx)(params, state, grads, **extra_args)
    return params, state


def skipped_steps(state):
    return int(ls.get_loss_scale_state(state).skipped_steps)


def later_steps(step, **extra_args):
    return step > 0


AROUND = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 10),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "MultiSteps that skips": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition(
        {"scaled": tx, "not": SGD}, {"w": "scaled", "b": "not"}
    ),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, later_steps
    ),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, later_steps),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "contrib.schedule_free": lambda tx: contrib.schedule_free(tx, 0.1),
    "contrib.mechanize": contrib.mechanize,
    "contrib.sam": lambda tx: contrib.sam(tx, SGD),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_wrapper_around_loss_scaling_is_refused(name):
    def gradient(tx):
        params = start_for(name)
        return ls.grad(lambda p: p["b"], tx.init(params))(PARAMS)

    wrap = AROUND[name]
    around = optax.chain(CLIP, wrap(ls.with_loss_scaling(ADAM)))
    with pytest.raises(ValueError, match="Put `with_loss_scaling` around the whole"):
        gradient(around)
    gradient(ls.with_loss_scaling(wrap(ADAM)))


def test_hyperparameters_are_injected_inside():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    tx = ls.with_loss_scaling(inner)
    params, state = run(tx, [GOOD, BAD])
    assert_same_bits(params, run(tx, [GOOD])[0])
    assert float(ls.get_loss_scale(state)) == 2.0**14
    assert int(state.inner_state.count) == 1


def test_accessors_take_the_inner_state():
    plain = contrib.schedule_free_sgd(0.1)
    params, state = run(ls.with_loss_scaling(plain), [GOOD, BAD, GOOD])
    expected_params, expected_state = run(plain, [GOOD, GOOD])
    accessor = contrib.schedule_free_eval_params
    # Two programs: their sums may round differently.
    chex.assert_trees_all_close(
        accessor(state.inner_state, params),
        accessor(expected_state, expected_params),
        rtol=1e-6,
    )
