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
    compiled_step,
    grads_for,
    make,
    params_for,
)
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
def test_optimizer_puts_no_new_nan_or_inf_anywhere(case):
    """Whatever the gradients are; without the check most do."""
    name, dtype = case
    tx = ls.with_loss_scaling(make(name), check_updates=True)
    step, start = compiled_step(name, tx), params_for(name, jnp.dtype(dtype))
    for size in SIZES:
        params, state = start, tx.init(start)
        for is_of_size in (True, False, True, True):
            grads = grads_for(name, params)
            if is_of_size:
                grads = jax.tree.map(lambda g, x=size: x * np.sign(g), grads)
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


def both(x, dtype=np.float32):
    return np.full(2, x, dtype)


ONE, INF, NAN = both(1.0), both(np.inf), both(np.nan)
HUGE = both(np.finfo("float16").max, np.float16)
KEY, COUNTS = jax.random.key(0), np.arange(2, dtype=np.int32)
COMPLEX = both(1, np.complex64)
# A model as in Equinox, whose functions have no updates.
MODEL = {"w": HUGE, "f": jnp.tanh, "name": "mlp", "not trained": HUGE}
UPDATES = {"w": both(100.0), "f": None, "name": None}


@pytest.mark.parametrize(
    ("update", "params", "new", "old", "applied"),
    [
        (ONE, ONE, ONE, ONE, True),
        # A mask among the parameters, or the best loss so far in the state.
        (ONE, -INF, INF, INF, True),
        (ONE, NAN, NAN, NAN, True),
        (ONE, ONE, ONE, NAN, True),
        (ONE, COUNTS, KEY, KEY, True),
        (COUNTS, COUNTS, ONE, ONE, True),
        (ONE, ONE, INF, -INF, False),
        (ONE, ONE, NAN, INF, False),
        (ONE, ONE, np.float32(np.nan), np.float32(0.0), False),
        (INF, -INF, ONE, ONE, False),
        (-INF, None, ONE, ONE, False),
        (COMPLEX * complex(1, np.nan), ONE, ONE, ONE, False),
        (COMPLEX, COMPLEX, ONE, ONE, True),
        (3e38 * COMPLEX, 3e38 * COMPLEX, ONE, ONE, False),
        (ONE, ONE, COMPLEX + both(np.inf * 1j, np.complex64), COMPLEX, False),
        (ONE, ONE, both(np.inf, np.complex64), both(np.inf, np.complex64), True),
        # Parameters that only their type makes overflow.
        (ONE, HUGE, ONE, ONE, True),
        (both(100.0), HUGE, ONE, ONE, False),
        (UPDATES, MODEL, ONE, ONE, False),
        ({**UPDATES, "w": both(-100.0)}, MODEL, ONE, ONE, True),
    ],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_new_nan_or_inf_skips_the_step(update, params, new, old, applied, around):
    """One that the step does not change may stay."""
    inner = transformation(lambda g, state: (update, (new,)), old)
    tx, grads = ls.with_loss_scaling(inner, check_updates=True), {"w": ONE}
    first = tx.init(ONE)
    _, state = around(lambda g, s: tx.update(g, s, params))(grads, first)
    assert bool(ls.was_applied(state)) is applied
    if not applied:
        assert_same_bits(state.inner_state, first.inner_state)


@pytest.mark.parametrize(("last", "applied"), [(-5000.0, True), (-6000.0, False)])
def test_parameters_and_not_master_weights_must_be_finite(last, applied):
    params, grads = np.array([60000, 1], np.float16), np.float32([last, 0])
    inner = ls.with_master_weights(optax.sgd(1.0))
    tx = ls.with_loss_scaling(inner, check_updates=True)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert bool(ls.was_applied(state)) is applied
    assert np.isfinite(optax.apply_updates(params, updates)).all()
