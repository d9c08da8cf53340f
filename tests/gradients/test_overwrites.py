"""What Flax's float8 layers overwrite with its "gradient" is never divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import slow_but

import optax_lossscale as ls

STATE = ls.FixedLossScale(1024.0).init()
PARAMS = {
    "params": {"w": np.ones(3, np.float32)},
    "_overwrite_with_gradient": {"layer": {"history": np.float32([1, 2])}},
}


@jax.custom_vjp
def observed(x, history):
    return x


def backward(x, cotangent):
    """The new value of the history, as of a type that is its own."""
    return cotangent, jnp.stack([cotangent[0] * x[0], 7.0 + 0 * x[0]])


observed.defvjp(lambda x, history: (x, x), backward)


def loss_fn(tree, factor=1.0):
    [history] = jax.tree.leaves(tree["_overwrite_with_gradient"])
    return jnp.sum(observed(factor * tree["params"]["w"], history))


WAYS = {
    "value_and_grad": lambda *args: ls.value_and_grad(loss_fn, STATE)(*args)[1],
    "grad": lambda *args: ls.grad(loss_fn, STATE)(*args),
    "retries": lambda *args: ls.value_and_grad_with_retries(loss_fn, STATE)(*args)[1],
    "scale_backward": lambda *args: jax.grad(ls.scale_backward(loss_fn, STATE))(*args),
    "scale_block": lambda *args: jax.grad(ls.scale_block(loss_fn))(*args),
    "by keyword": lambda *args: ls.value_and_grad(
        lambda tree, factor=1.0: loss_fn(tree=tree, factor=factor), STATE
    )(*args)[1],
}


CASES = {way: jax.jit(gradients) for way, gradients in WAYS.items()}
CASES |= {f"{way}, eager": gradients for way, gradients in WAYS.items()}


@pytest.mark.parametrize("case", slow_but([*WAYS, "value_and_grad, eager"], CASES))
def test_overwrites_keep_the_old_value_of_a_nonfinite_one(case):
    gradients = CASES[case]
    scale = 512.0 if "scale_block" in case else 1024.0  # a block chooses for a loss
    for factor, expected in ((1.0, [scale, 7.0]), (np.nan, [1.0, 2.0])):
        grads = gradients(PARAMS, factor)
        [new] = jax.tree.leaves(grads["_overwrite_with_gradient"])
        np.testing.assert_array_equal(new, expected)
        np.testing.assert_array_equal(grads["params"]["w"], factor * np.ones(3))


def test_unscale_grads_leaves_it_alone():
    grads = ls.unscale_grads(PARAMS, STATE)
    [new] = jax.tree.leaves(grads["_overwrite_with_gradient"])
    np.testing.assert_array_equal(new, [1.0, 2.0])
    np.testing.assert_array_equal(grads["params"]["w"], 2.0**-10)
