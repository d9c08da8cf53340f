"""One small training run, for comparing many devices with one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from asserts import assert_same_bits
from training import make_step, normal, train

import optax_lossscale as ls

PARAMS = {"w": np.arange(32.0).reshape(8, 4) / 32, "b": np.zeros(4)}
PARAMS = jax.device_put(jax.tree.map(np.float32, PARAMS))
X, BAD_X = normal(5, 16, 8), normal(5, 16, 8)
BAD_X[2, 11, 3] = np.nan  # in the part of one device alone
RULE = ls.DynamicLossScale(growth_interval=2)
ADAM = optax.adam(1e-2)
TX = ls.with_loss_scaling(ADAM, RULE)


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"] - 1.0))


STEP = jax.jit(make_step(TX, loss_fn))


def alone(xs):
    """What a run reaches on one device."""
    return train(STEP, PARAMS, TX.init(PARAMS), xs)


def vary(tree, axes):
    """Else shard_map sums the gradients over the devices by itself."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), tree)
    return jax.tree.map(lambda x: jax.lax.pvary(x, axes), tree)


def like_params(tx, of_params, of_the_rest):
    """A tree like the state: of the parameters for the moments, else of the rest."""
    return optax.tree.map_params(
        tx,
        lambda _, of_param: of_param,
        jax.eval_shape(tx.init, PARAMS),
        of_params,
        transform_non_params=lambda _: of_the_rest,
    )


def assert_agree(actual, expected):
    """Sums over devices round differently; flags, counters and scales may not.

    Each is a pair of parameters and the optimizer state.
    """
    scale_states = (ls.get_loss_scale_state(state) for _, state in (actual, expected))
    assert_same_bits(*map(jax.device_get, scale_states))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
