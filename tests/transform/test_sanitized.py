"""What an optimizer is given in the place of bad gradients and extra arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls

GRADS = {"w": jnp.array([[1.0, 2.0, 3.0]]), "n": jnp.arange(2)}
BAD = {**GRADS, "w": GRADS["w"].at[0, 1].set(jnp.nan)}
NUMBERS = {
    "value": jnp.float32(3.0),
    "batch": (jnp.array([1.0, jnp.inf]), jnp.arange(3)),
}


def given(grads, **extra_args):
    """The gradients and the extra arguments that reach the optimizer."""
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(grads=updates, **extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = ls.with_loss_scaling(inner)
    tx.update(grads, tx.init(grads), **extra_args)
    return seen.pop("grads"), seen


@pytest.mark.parametrize("as_array", [jnp.asarray, np.asarray])
def test_only_a_skipped_step_is_given_other_numbers_and_they_are_finite(as_array):
    good, bad = (jax.tree.map(as_array, tree) for tree in (GRADS, BAD))
    grads, extra_args = given(good, **NUMBERS)
    assert_same_bits((grads, extra_args), (good, NUMBERS))
    grads, extra_args = given(bad, **NUMBERS)
    assert grads["n"] is bad["n"] and np.isfinite(grads["w"]).all()
    first, integers = extra_args["batch"]
    assert first[0] == 1.0 and np.isfinite(first[1])
    assert integers is NUMBERS["batch"][1]
    assert 1e37 < extra_args["value"] < np.inf  # any other is better
