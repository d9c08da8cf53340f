"""Every optimizer that optax has: wrapped, it is itself, and a skip leaves no trace."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import (
    ARGUMENTS,
    FACTORIES,
    LEFT_OUT,
    OPTIMIZERS,
    VARIANTS,
    grads_for,
    make,
    params_for,
    required,
    update,
    value_fn,
)
from helpers import assert_no_update, assert_same_bits, assert_same_types, without_keys

import optax_lossscale as ls

# Warnings of optax about its own factories.
pytestmark = [
    pytest.mark.filterwarnings("ignore:. of . parameters are float16"),
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated"),
    pytest.mark.filterwarnings('ignore:"seed" is deprecated'),
    # L-BFGS writes float32 differences into its float16 memory.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types"),
]

# What optax itself cannot do; asserted below.
BRANCHES_DIFFER = ["optax.novograd", "optax.contrib.galore"]
DIVIDES_BY_ZERO = ["optax.contrib.dadapt_adamw", "optax.contrib.prodigy"]
FAILS = {(name, dtype) for name in BRANCHES_DIFFER for dtype in ("float16", "bfloat16")}
FAILS |= {(name, "float16") for name in DIVIDES_BY_ZERO}


# Its line search weighs a float16 slope against another, and in ours a float32 one: it
# may accept another step, as good as the unwrapped optimizer's.
CHOOSES_OTHERWISE = ("optax.lbfgs", "float16")

# What most people use, and what is made in a way of its own.
USUAL = {
    *("optax.adafactor", "optax.adamw", "optax.adan", "optax.lion"),
    *("optax.sgd", "adam scheduled", "clip + adamw", "momentum"),
}


def cases():
    """The usual optimizers in float32; all others, and half precision, are slow."""
    for name in [*FACTORIES, *VARIANTS]:
        if name in LEFT_OUT:
            continue
        optimizer = name in OPTIMIZERS or name in VARIANTS
        marks = () if name in USUAL else pytest.mark.slow
        yield pytest.param(name, "float32", marks=marks)
        for dtype in ("float16", "bfloat16") if optimizer else ():
            if (name, dtype) not in FAILS:
                yield pytest.param(name, dtype, marks=pytest.mark.slow)


def test_every_factory_can_be_called():
    """A factory that a new optax brings is tested from the day it appears."""
    assert len(OPTIMIZERS) >= 40 and {*OPTIMIZERS, *VARIANTS} >= USUAL
    unknown = {
        (name, parameter)
        for name in FACTORIES.keys() - LEFT_OUT.keys()
        for parameter in required(name)
        if parameter not in ARGUMENTS
    }
    assert not unknown, f"add a value to ARGUMENTS, or the name to LEFT_OUT: {unknown}"


def stepper(name, tx):
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, new_state = update(name, tx, grads, state, params)
        return optax.apply_updates(params, updates), new_state, updates

    return step, traces


@pytest.mark.parametrize("name, dtype", list(cases()))
def test_a_wrapped_optimizer(name, dtype):
    inner = make(name)
    tx = ls.with_loss_scaling(inner)
    step, traces = stepper(name, tx)
    plain_step, _ = stepper(name, inner)
    params = plain_params = params_for(name, jnp.dtype(dtype))
    state = tx.init(params)
    plain_state = jax.tree.map(jnp.asarray, inner.init(params))

    def both(params, state, plain_params, plain_state):
        """A good step: the unwrapped optimizer's, to rounding."""
        grads = grads_for(name, params)
        params, state, _ = step(params, state, grads)
        plain_params, plain_state, _ = plain_step(plain_params, plain_state, grads)
        return params, state, plain_params, plain_state

    run = params, state, plain_params, plain_state
    for _ in range(2):  # so that no state is still zero
        run = both(*run)
    params, state, *plain = run

    good = grads_for(name, params)
    for leaf in good:
        for bad in (jnp.nan, jnp.inf, -jnp.inf):
            last = (-1,) * good[leaf].ndim
            grads = {**good, leaf: good[leaf].at[last].set(bad)}
            new_params, skipped, updates = step(params, state, grads)
            assert_no_update(updates)
            assert_same_bits(new_params, params)
            assert_same_bits(skipped.inner_state, state.inner_state)
            assert not skipped.scale_state.grads_finite
            assert_same_types(skipped, state)

    params, state, plain_params, plain_state = both(new_params, skipped, *plain)
    assert len(traces) == 1
    assert_same_types(params, new_params)
    assert_same_types(state, skipped)
    if (name, dtype) == CHOOSES_OTHERWISE:
        assert value_fn(params) < 0.8 * value_fn(params_for(name))
        return
    eps = float(jnp.finfo(dtype).eps)
    for actual, expected in ((params, plain_params), (state.inner_state, plain_state)):
        chex.assert_trees_all_close(
            *map(as_float, (actual, expected)), rtol=max(20 * eps, 2e-4), atol=20 * eps
        )


def as_float(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), without_keys(tree))


@pytest.mark.parametrize("name", BRANCHES_DIFFER)
def test_some_optimizers_fail_in_half_precision_without_the_wrapper_too(name):
    if name not in FACTORIES:
        pytest.skip("needs a newer optax")
    params, tx = params_for(name, jnp.float16), make(name)
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        update(name, tx, grads_for(name, params), tx.init(params), params)


@pytest.mark.parametrize("name", DIVIDES_BY_ZERO)
def test_some_optimizers_make_nan_of_finite_gradients_in_float16(name):
    params, tx = params_for(name, jnp.float16), make(name)
    step, _ = stepper(name, tx)
    state, grads = tx.init(params), grads_for(name, params)
    for _ in range(2):
        params, state, _ = step(params, state, grads)
    assert not ls.all_finite(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPTIMIZERS, *VARIANTS])
def test_derivatives_through_a_skipped_step_are_the_unwrapped_optimizers(name):
    """As if the step had not been, where training itself is differentiated."""

    def reached(tx, factors):
        def train(x):
            params = jax.tree.map(lambda p: p * x, params_for(name))
            state = tx.init(params)
            for factor in factors:
                grads = optax.tree.scale(factor, grads_for(name, params))
                updates, state = update(name, tx, grads, state, params)
                params = optax.apply_updates(params, updates)
            return sum(map(jnp.sum, jax.tree.leaves(params)))

        # Forward, since the line searches have no reverse mode.
        return jax.jit(lambda x: jax.jvp(train, (x,), (1.0,)))(1.0)

    actual = reached(ls.with_loss_scaling(make(name)), (1.0, np.nan, 1.0))
    expected = reached(make(name), (1.0, 1.0))
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    # DoG's own derivative at its first step is that of a norm at 0.
    assert np.isfinite(actual).all() or name == "optax.contrib.dog"
