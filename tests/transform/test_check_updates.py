"""`check_updates`: what an optimizer makes of finite gradients is checked, too."""

import itertools

import equinox as eqx
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
    compiled_step,
    grads_for,
    make,
    params_for,
)
from shared import slow_but
from training import transformation

import optax_lossscale as ls

pytestmark = IGNORED_WARNINGS

SIZES = [0.0, 1e-7, 300.0, 1e20, 1e30]


def is_new_and_bad(new, old):
    new, old = (np.asarray(x, np.complex128) for x in (new, old))
    return (~np.isfinite(new) & (new != old)).any()


QUICK = [("optax.adamw", "float16"), ("momentum", "float32")]
CASES = itertools.product([*OPTIMIZERS, *VARIANTS], ("float16", "float32"))


@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids="-".join)
def test_optimizer_puts_no_new_nan_or_inf_anywhere(case):
    """Whatever the gradients are. Small ones are applied."""
    name, dtype = case
    tx = ls.with_loss_scaling(make(name), check_updates=True)
    step, start = compiled_step(name, tx), params_for(name, jnp.dtype(dtype))
    first = jax.jit(tx.init)(start)
    for size in SIZES:
        (params, state), applied = (start, first), False
        for is_of_size in (True, False, True, True):
            grads = grads_for(name, params)
            if is_of_size:
                grads = jax.tree.map(lambda g, x=size: x * np.sign(g), grads)
            old, old_scale = (params, state.inner_state), state.scale_state
            params, state, updates = step(params, state, grads)
            new = params, state.inner_state
            leaves = [jax.tree.leaves(without_keys(x)) for x in (new, old)]
            assert not any(map(is_new_and_bad, *leaves))
            assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, updates)))
            applied |= bool(ls.was_applied(state))
            if not ls.was_applied(state):
                assert_no_update(updates)
                assert_same_bits(new, old)
                recorded = jax.device_get(old_scale).record(False)
                assert_same_bits(state.scale_state, recorded)
        assert applied or size > 1e-7


def both(x, dtype=np.float32):
    return np.full(2, x, dtype)


ONE, INF, NAN = both(1.0), both(np.inf), both(np.nan)
HUGE = both(np.finfo("float16").max, np.float16)
KEY = jax.random.wrap_key_data(np.uint32([0, 0]))
COUNTS = np.arange(2, dtype=np.int32)
COMPLEX, INFJ = both(1, np.complex64), both(complex(0, np.inf), np.complex64)
# A model as in Equinox, whose functions have no updates.
MODEL = {"w": HUGE, "f": jnp.tanh, "name": "mlp", "not trained": HUGE}
UPDATES = {"w": both(100.0), "f": None, "name": None}


# The update, the parameters, the new state and the old one, and whether it is applied.
ROWS = {
    "all finite": (ONE, ONE, ONE, ONE, True),
    "infinite state, masked parameters": (ONE, -INF, INF, INF, True),
    "NaN that stays": (ONE, NAN, NAN, NAN, True),
    "NaN that goes": (ONE, ONE, ONE, NAN, True),
    "key and integer parameters": (ONE, COUNTS, KEY, KEY, True),
    "integer updates": (COUNTS, COUNTS, ONE, ONE, True),
    "-inf becomes inf": (ONE, ONE, INF, -INF, False),
    "inf becomes NaN": (ONE, ONE, NAN, INF, False),
    "scalar becomes NaN": (ONE, ONE, np.float32(np.nan), np.float32(0.0), False),
    "infinite update": (INF, -INF, ONE, ONE, False),
    "infinite update, no parameters": (-INF, None, ONE, ONE, False),
    "complex update, NaN": (COMPLEX * complex(1, np.nan), ONE, ONE, ONE, False),
    "complex update": (COMPLEX, COMPLEX, ONE, ONE, True),
    "complex sum": (3e38 * COMPLEX, 3e38 * COMPLEX, ONE, ONE, False),
    "complex state becomes inf": (ONE, ONE, COMPLEX + INFJ, COMPLEX, False),
    "complex state stays inf": (ONE, ONE, INFJ, INFJ, True),
    # Only their type makes the parameters overflow.
    "small step in float16": (ONE, HUGE, ONE, ONE, True),
    "large step in float16": (both(100.0), HUGE, ONE, ONE, False),
    "Equinox": (UPDATES, MODEL, ONE, ONE, False),
    "Equinox, downwards": ({**UPDATES, "w": both(-100.0)}, MODEL, ONE, ONE, True),
}


@eqx.filter_jit
def state_after(grads, update, params, new, old):
    """The state after a step of an optimizer that returns an update and a new state."""
    inner = transformation(lambda g, state: (update, (new,)), old)
    tx = ls.with_loss_scaling(inner, check_updates=True)
    return tx.update(grads, tx.init(ONE), params)[1]


@pytest.mark.parametrize("row", ROWS)
def test_new_nan_or_inf_skips_the_step(row):
    """One that the step does not change may stay."""
    update, params, new, old, applied = ROWS[row]
    state = state_after({"w": ONE}, update, params, new, old)
    assert bool(ls.was_applied(state)) is applied
    if not applied:
        assert_same_bits(state.inner_state, (old,))


TO_FLOAT16 = ls.with_loss_scaling(
    ls.with_master_weights(optax.sgd(1.0)), check_updates=True
)


@pytest.mark.parametrize(
    ("update", "applied"), [(5000.0, True), (6000.0, False)], ids=["65000", "66000"]
)
def test_parameters_and_not_master_weights_must_be_finite(update, applied):
    """The largest float16 is 65504."""
    params, grads = np.array([60000, 1], np.float16), np.float32([-update, 0])
    state = jax.jit(TO_FLOAT16.init)(params)
    updates, state = jax.jit(TO_FLOAT16.update)(grads, state, params)
    assert bool(ls.was_applied(state)) is applied
    assert np.isfinite(jax.jit(optax.apply_updates)(params, updates)).all()
