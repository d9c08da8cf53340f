"""`check_updates`: what an optimizer makes of finite gradients is checked, too."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits, without_keys
from every_optimizer import (
    IGNORED_WARNINGS,
    OPTIMIZERS,
    VARIANTS,
    grads_for,
    make,
    params_for,
    update,
)
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from shared import slow_but
from training import transformation

import optax_lossscale as ls

pytestmark = IGNORED_WARNINGS

QUICK = [("optax.adamw", "float16"), ("momentum", "float32")]
SIZES = [0.0, 1e-7, 300.0, 1e20, 1e30]


def is_new_and_bad(new, old):
    new, old = (np.asarray(x, np.complex128) for x in (new, old))
    return (~np.isfinite(new) & (new != old)).any()


CASES = itertools.product([*OPTIMIZERS, *VARIANTS], ("float16", "float32"))


@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids="-".join)
def test_no_optimizer_puts_anything_bad_anywhere(case):
    """Whatever the gradients are; without the check most do."""
    name, dtype = case
    tx = ls.with_loss_scaling(make(name), check_updates=True)

    @jax.jit
    def step(params, state, grads):
        updates, state = update(name, tx, grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    start = params_for(name, jnp.dtype(dtype))
    for size in SIZES:
        params, state = start, tx.init(start)
        for of_size in (True, False, True, True):
            grads = grads_for(name, params)
            if of_size:
                signs = jax.tree.map(np.sign, grads)
                grads = optax.tree.scale(np.float32(size), signs)
            old, old_scale = (params, state.inner_state), state.scale_state
            params, state, updates = step(params, state, grads)
            new = params, state.inner_state
            leaves = [jax.tree.leaves(without_keys(x)) for x in (new, old)]
            assert not any(map(is_new_and_bad, *leaves))
            assert ls.all_finite((params, updates))
            if not ls.was_applied(state):
                assert_no_update(updates)
                assert_same_bits(new, old)
                assert_same_bits(state.scale_state, old_scale.record(False))


RULE = ls.DynamicLossScale(growth_interval=5, hysteresis=2)
PARAMS = {"w": np.ones(3, np.float32), "b": np.float32(1.0)}


def test_only_an_overflow_of_gradients_moves_the_scale():
    tx = ls.with_loss_scaling(optax.adam(0.1), RULE, check_updates=True)
    step = jax.jit(tx.update)

    def after(factor, state, value=1.0):
        grads = optax.tree.scale(np.float32(factor), PARAMS)
        return step(grads, state, PARAMS, value=np.float32(value))[1].scale_state

    state = step(PARAMS, tx.init(PARAMS), PARAMS)[1]
    scale_state = state.scale_state
    skipped = scale_state.record(False)
    # No scale cures an optimizer that overflows; the hysteresis is not used up either.
    assert_same_bits(after(1e30, state), skipped)
    assert_same_bits(after(1e30, state, jnp.nan), skipped)
    # An overflow is the rule's own affair.
    assert_same_bits(after(jnp.inf, state), RULE.update(scale_state, False))
    assert_same_bits(after(jnp.inf, state, jnp.nan), skipped)
    assert_same_bits(after(1.0, state), RULE.update(scale_state, True))


@pytest.mark.parametrize("wrap", [lambda tx: tx, ls.with_master_weights])
def test_parameters_that_only_their_type_makes_overflow_are_seen(wrap):
    """Master weights may be beyond, and the parameters not."""
    params = np.array([60000.0, 1.0], np.float16)
    tx = ls.with_loss_scaling(wrap(optax.sgd(1.0)), check_updates=True)

    @jax.jit
    def step(grads):
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), ls.was_applied(state)

    for last, expected in ((-5000.0, True), (-6000.0, False)):
        new_params, applied = step(np.array([last, 0.0], np.float32))
        assert bool(applied) is expected
        assert np.isfinite(new_params).all()


def test_a_nan_that_the_step_does_not_change_does_not_skip_it():
    """A mask of -inf among the parameters, and the best loss so far in the state."""

    def applied(update, param, new, old):
        inner = transformation(lambda g, state: (update, (new,)), old)
        tx = ls.with_loss_scaling(inner, check_updates=True)
        old_state = tx.init(param)
        _, state = tx.update(np.ones(2, np.float32), old_state, param)
        if not ls.was_applied(state):
            assert_same_bits(state.inner_state, old_state.inner_state)
        return bool(ls.was_applied(state))

    inf, nan, one = (np.full(2, x, np.float32) for x in (np.inf, np.nan, 1.0))
    assert applied(one, -inf, inf, inf) and applied(one, nan, nan, nan)
    assert applied(one, one, one, nan)
    assert not applied(one, one, inf, -inf) and not applied(one, one, nan, inf)
    assert not applied(inf, -inf, one, one) and not applied(-inf, None, one, one)
    imaginary = np.full(2, complex(1.0, np.nan), np.complex64)
    assert not applied(imaginary, one, one, one)
    assert not applied(one, one, np.float32(np.nan), np.float32(0.0))
    key = jax.random.key(0)
    counts = np.arange(2, dtype=np.int32)
    assert applied(one, counts, key, key) and applied(counts, counts, one, one)


@pytest.mark.parametrize("spec", [P("d"), P()])
def test_all_devices_decide_alike(spec):
    """Where each updates its own shard, and where arrays are global."""
    params, grads = np.ones((2, 16), np.float32)
    grads[5] = 1e30  # on one device

    def step(params, grads, axis_name=None):
        tx = ls.with_loss_scaling(
            optax.adam(0.1), axis_name=axis_name, check_updates=True
        )
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), ls.was_applied(state)

    mapped = on_mesh(lambda p, g: step(p, g, "d"), P("d"), (P("d"), P()))
    placed = jax.device_put((params, grads), jax.NamedSharding(make_mesh(d=8), spec))
    for function in (mapped, jax.jit(step)):
        new_params, applied = function(*placed)
        assert not applied
        assert_same_bits(new_params, params)


@pytest.mark.parametrize("compiled", [True, False])
def test_derivatives_are_those_without_the_skipped_step(compiled):
    """A zero that goes back through an infinite exponential would be NaN."""
    grads = np.array([0.1, -0.2, 0.3], np.float32)
    exponential = optax.stateless(lambda g, params: jax.tree.map(jnp.exp, g))
    inner = optax.chain(exponential, optax.sgd(0.1, momentum=0.9))

    def reached(tx, factors):
        def train(x):
            params = x * np.ones(3, np.float32)
            state = tx.init(params)
            for factor in factors:
                updates, state = tx.update(factor * x * grads, state, params)
                params = optax.apply_updates(params, updates)
            return jnp.sum(params**2)

        function = jax.value_and_grad(train)
        return (jax.jit(function) if compiled else function)(1.0)

    tx = ls.with_loss_scaling(inner, check_updates=True)
    actual = reached(tx, (1e4, 1.0, 1e4, 1.0))
    np.testing.assert_allclose(actual, reached(inner, (1.0, 1.0)), rtol=1e-5)


def test_parameters_beside_leaves_without_an_update_are_checked():
    """Such as the functions in an Equinox model, whose gradients are None."""
    huge = np.full(2, np.finfo("float16").max, np.float16)
    params = {"w": huge, "f": jnp.tanh, "name": "mlp", "not trained": huge}
    arrays = {"w": huge, "f": None, "name": None}
    tx = ls.with_loss_scaling(optax.sgd(-1.0), check_updates=True)
    for sign, applied in ((-1, True), (1, False)):
        grads = {**arrays, "w": sign * huge.astype(np.float32)}
        _, state = tx.update(grads, tx.init(arrays), params)
        assert bool(ls.was_applied(state)) is applied
