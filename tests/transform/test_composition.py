"""Wrappers of Optax: each works inside of loss scaling, and none around it."""

import chex
import jax
import numpy as np
import optax
import pytest
from optax import contrib

import optax_lossscale as ls

PARAMS = {"w": np.float32([1.0, -2.0, 3.0]), "b": np.float32(0.5)}
GOOD = {"w": np.float32([3.0, -4.0, 0.0]), "b": np.float32(0.0)}
BAD = {**GOOD, "b": np.float32(np.nan)}
MASK, SGD, ADAM = {"w": True, "b": False}, optax.sgd(0.1), optax.adam(0.1)


def later_steps(step, **extra_args):
    return step > 0


WRAPPERS = {
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


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_belongs_inside_of_loss_scaling(name):
    """Around it, the gradient is refused, and the message says where to put it."""

    def gradient(tx):
        is_pair = name == "lookahead"
        params = optax.LookaheadParams.init_synced(PARAMS) if is_pair else PARAMS
        return ls.grad(lambda p: p["b"], tx.init(params))(PARAMS)

    wrap = WRAPPERS[name]
    around = optax.chain(optax.clip(1.0), wrap(ls.with_loss_scaling(ADAM)))
    with pytest.raises(ValueError, match="Put `with_loss_scaling` around the whole"):
        gradient(around)
    assert gradient(ls.with_loss_scaling(wrap(ADAM)))["b"] == 1


def test_accessor_of_optax_takes_the_inner_state():
    tx, accessor = contrib.schedule_free_sgd(0.1), contrib.schedule_free_eval_params
    scaled = ls.with_loss_scaling(tx)
    plain, state = jax.jit(tx.update), scaled.init(PARAMS)
    updates, expected = plain(GOOD, tx.init(PARAMS), PARAMS)
    for grads in (GOOD, BAD):
        _, state = jax.jit(scaled.update)(grads, state, PARAMS)
    params = optax.apply_updates(PARAMS, updates)
    # Two programs: their sums may round differently.
    actual = accessor(state.inner_state, params)
    chex.assert_trees_all_close(actual, accessor(expected, params), rtol=1e-6)
