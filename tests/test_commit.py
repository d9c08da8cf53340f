"""Skipped steps leave no trace, for every optimizer and every kind of bad leaf."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, assert_same_types
from optax import contrib

import optax_lossscale as ls

PARAMS = {
    # Of full rank: Muon's orthogonalisation would blow up the rounding of any other.
    "w": jax.random.normal(jax.random.key(0), (4, 3)),
    "b": jnp.array([0.1, -0.2, 0.3]),
    "s": jnp.array(0.5),
}


def value_fn(params):
    leaves = jax.tree.leaves(params)
    return sum(jnp.sum((x.astype(jnp.float32) - 0.25) ** 2) for x in leaves)


OPTIMIZERS = {
    "adabelief": optax.adabelief(0.1),
    "adadelta": optax.adadelta(0.1),
    "adafactor": optax.adafactor(0.1),
    "adafactor factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "adam float32 moments": optax.adam(0.1, mu_dtype=jnp.float32),
    "adamax": optax.adamax(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "adan": optax.adan(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "dog": contrib.dog(0.1),
    "fromage": optax.fromage(0.1),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "lbfgs": optax.lbfgs(),
    "lbfgs without line search": optax.lbfgs(0.1, linesearch=None),
    "lion": optax.lion(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "muon": contrib.muon(0.1),
    "nadamw": optax.nadamw(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "novograd": optax.novograd(0.1),
    "optimistic": optax.optimistic_gradient_descent(0.1),
    "polyak sgd": optax.polyak_sgd(0.1),
    "prodigy": contrib.prodigy(0.1),
    "radam": optax.radam(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "rprop": optax.rprop(0.1),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "schedule-free": contrib.schedule_free_adamw(0.1),
    "schedule-free sgd": contrib.schedule_free_sgd(0.1),
    "sgd": optax.sgd(0.1),
    "sm3": optax.sm3(0.1),
    "yogi": optax.yogi(0.1),
}


def params_for(name):
    # SM3 itself has no accumulator for a scalar.
    return {k: v for k, v in PARAMS.items() if name != "sm3" or v.ndim}


def make_step(tx, params):
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state, grads):
        value = value_fn(params).astype(jnp.float32)
        updates, state = tx.update(
            grads, state, params, value=value, grad=grads, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), state, updates

    return step, params, tx.init(params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_every_bit(name):
    tx = ls.with_loss_scaling(OPTIMIZERS[name])
    step, params, state = make_step(tx, params_for(name))
    for _ in range(2):  # so that no state is still zero
        params, state, _ = step(params, state, jax.grad(value_fn)(params))
    good = jax.grad(value_fn)(params)
    for leaf in params:
        for bad in (jnp.nan, jnp.inf, -jnp.inf):
            index = (-1,) * good[leaf].ndim
            grads = {**good, leaf: good[leaf].at[index].set(bad)}
            new_params, new_state, updates = step(params, state, grads)
            assert_same_bits(updates, jax.tree.map(jnp.zeros_like, updates))
            assert_same_bits(new_params, params)
            assert_same_bits(new_state.inner_state, state.inner_state)
            assert not new_state.scale_state.grads_finite
            assert_same_types(new_state, state)
    # And the run goes on from there as if the bad steps had not been.
    after_skip = step(params, new_state, good)
    without_skip = step(params, state, good)
    assert_same_bits(after_skip[0], without_skip[0])
    assert_same_bits(after_skip[1].inner_state, without_skip[1].inner_state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_without_overflow_is_the_unwrapped_optimizers(name):
    def run(tx):
        step, params, state = make_step(tx, params_for(name))
        for _ in range(4):
            params, state, _ = step(params, state, jax.grad(value_fn)(params))
        return params, state

    params, state = run(ls.with_loss_scaling(OPTIMIZERS[name]))
    plain_params, plain_state = run(OPTIMIZERS[name])
    chex.assert_trees_all_close(params, plain_params, rtol=2e-5, atol=1e-6)
    chex.assert_trees_all_close(state.inner_state, plain_state, rtol=2e-4, atol=1e-5)


def half_params(name, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), params_for(name))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_novograd_fails_in_half_precision_without_the_wrapper_too(dtype):
    """Why the next test leaves it out: the branches of its own ``cond`` differ."""
    step, params, state = make_step(
        OPTIMIZERS["novograd"], half_params("novograd", dtype)
    )
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        step(params, state, jax.tree.map(lambda x: x.astype(jnp.float32), params))


# optax's L-BFGS writes float32 differences into float16 memory, wrapped or not.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "novograd"])
def test_half_precision_parameters_and_float32_gradients(name, dtype):
    params = half_params(name, dtype)
    tx = ls.with_loss_scaling(OPTIMIZERS[name])
    step, params, state = make_step(tx, params)

    def grads(params):
        return ls.grad(value_fn, state)(params)

    for factor in (1.0, np.nan, 1.0):
        scaled = jax.tree.map(lambda g, f=factor: g * f, grads(params))
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(scaled))
        new_params, new_state, _ = step(params, state, scaled)
        assert_same_types(new_state, state)
        assert_same_types(new_params, params)
        if np.isnan(factor):
            assert_same_bits(new_params, params)
            assert_same_bits(new_state.inner_state, state.inner_state)
        params, state = new_params, new_state
