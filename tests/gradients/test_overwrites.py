"""What Flax's float8 layers overwrite with its "gradient" is never divided."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState
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


class Float8(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (32, 8):
            x = nn.relu(x)
            x = nn.Dense(width, jnp.float16, dot_general_cls=Fp8DirectDotGeneralOp)(x)
        return x.astype(jnp.float32)


@pytest.mark.slow
def test_float8_layers_of_flax_train_through_a_bad_batch():
    net, x = Float8(), jax.random.normal(jax.random.key(0), (64, 16))
    state = TrainState.create(
        apply_fn=net.apply,
        params=net.init(jax.random.key(1), x),  # with all collections
        tx=ls.with_loss_scaling(optax.adam(1e-2)),
    )

    @jax.jit
    def step(state, weight):
        def loss_fn(params):
            return weight * jnp.mean((net.apply(params, x) - jnp.sin(x[:, :8])) ** 2)

        loss, grads = ls.value_and_grad(loss_fn, state)(state.params)
        return state.apply_gradients(grads=grads), loss

    for i in range(200):
        state, loss = step(state, jnp.inf if i == 50 else 1.0)
    assert loss < 0.05 and ls.all_finite(state.params)
    assert ls.get_loss_scale_state(state).skipped_steps == 1
