"""Whole steps: jit, scan, vmap, cond, donation, transfers, derivatives, noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits, assert_same_types, float16_loss
from jax.experimental import checkify

import optax_lossscale as ls

RULE = ls.DynamicLossScale(init_scale=2.0**10, growth_interval=3)
TX = ls.with_loss_scaling(optax.adam(1e-2), RULE)
PARAMS = {"w": jnp.array([[0.5, -1.0], [2.0, 0.25]]), "b": jnp.zeros(2)}
X = jax.random.normal(jax.random.key(0), (12, 8, 2))
# The second batch overflows float16, the seventh holds a NaN.
X = X.at[1, 0, 0].set(1e6).at[6, 3, 1].set(jnp.nan)


def train_step(carry, x, tx=TX):
    params, state = carry
    loss, grads = ls.value_and_grad(float16_loss, state)(params, x)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss


def run_jitted(step=train_step, **jit_options):
    traces = []

    def counting(carry, x):
        traces.append(1)
        return step(carry, x)

    compiled = jax.jit(counting, **jit_options)
    carry = jax.tree.map(jnp.copy, (PARAMS, TX.init(PARAMS)))
    losses = []
    for x in X:
        carry, loss = compiled(carry, x)
        losses.append(loss)
    assert len(traces) == 1
    return carry, jnp.stack(losses)


@pytest.fixture(scope="module")
def reference():
    return run_jitted()


def test_the_two_bad_batches_are_skipped_and_the_scale_moves(reference):
    (params, state), losses = reference
    assert int(state.scale_state.skipped_steps) == 2
    assert int(state.inner_state[0].count) == len(X) - 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    assert np.isfinite(losses).sum() == len(X) - 2
    scale, good = 2.0**10, 0
    for step in range(len(X)):
        if step in (1, 6):
            scale, good = scale / 2, 0
        else:
            good += 1
            if good == 3:
                scale, good = scale * 2, 0
    assert float(ls.get_loss_scale(state)) == scale


def test_powers_of_two_change_no_bit_of_what_neither_overflows_nor_is_flushed():
    def run(scale):
        tx = ls.with_loss_scaling(optax.adam(1e-2), ls.FixedLossScale(scale))
        step = jax.jit(functools.partial(train_step, tx=tx))
        carry = (PARAMS, tx.init(PARAMS))
        for x in X[2:6]:
            carry, _ = step(carry, x)
        return carry[0], carry[1].inner_state

    assert_same_bits(run(2.0**6), run(2.0**10))


def test_scan_equals_a_loop_of_jitted_steps(reference):
    carry, losses = jax.lax.scan(train_step, (PARAMS, TX.init(PARAMS)), X)
    assert_close(carry, reference[0])
    np.testing.assert_allclose(losses, reference[1], rtol=1e-6)


def test_while_loop_and_cond_carry_the_state(reference):
    def body(carry):
        i, carry = carry
        step = functools.partial(train_step, x=X[i])
        return i + 1, jax.lax.cond(i >= 0, lambda c: step(c)[0], lambda c: c, carry)

    start = (0, (PARAMS, TX.init(PARAMS)))
    _, carry = jax.lax.while_loop(lambda c: c[0] < len(X), body, start)
    assert_close(carry, reference[0])


def test_donation_changes_nothing_and_is_used(reference):
    donated, _ = run_jitted(donate_argnums=0)
    assert_same_bits(donated, reference[0])
    params, state = carry = jax.tree.map(jnp.copy, (PARAMS, TX.init(PARAMS)))
    jax.jit(train_step, donate_argnums=0)(carry, X[0])
    used = jax.tree.leaves((params, state.inner_state))
    assert all(x.is_deleted() for x in used)


def test_a_freshly_jitted_init_can_be_donated():
    state = jax.jit(TX.init)(PARAMS)
    jax.jit(lambda s: TX.update(PARAMS, s, PARAMS)[1], donate_argnums=0)(state)


def test_types_are_those_of_init(reference):
    assert_same_types(reference[0][1], TX.init(PARAMS))


def test_a_whole_train_step_holds_under_the_transfer_guard():
    step = jax.jit(train_step)
    carry, x = (PARAMS, TX.init(PARAMS)), jnp.copy(X[0])
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            carry, _ = step(carry, x)


def test_an_ensemble_has_a_scale_each():
    batches = jnp.stack([X[0], X[1], X[2]])
    params = jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS)
    state = jax.vmap(TX.init)(params)
    (_, new_state), _ = jax.jit(jax.vmap(train_step))((params, state), batches)
    assert new_state.scale_state.grads_finite.tolist() == [True, False, True]
    assert new_state.scale_state.loss_scale.tolist() == [1024.0, 512.0, 1024.0]
    alone, _ = train_step((PARAMS, TX.init(PARAMS)), X[0])
    first = jax.tree.map(lambda x: x[0], new_state)
    assert_close(first, alone[1])


def test_with_an_axis_name_the_ensemble_skips_together():
    tx = ls.with_loss_scaling(optax.sgd(0.1), RULE, axis_name="member")
    grads = jnp.array([[1.0, 2.0], [jnp.inf, 1.0]])
    params = jnp.ones((2, 2))
    state = jax.vmap(tx.init)(params)
    updates, state = jax.vmap(tx.update, axis_name="member")(grads, state, params)
    assert_no_update(updates)
    assert state.scale_state.grads_finite.tolist() == [False, False]


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-6)


def adam(learning_rate):
    return optax.adam(learning_rate, b2=1 - learning_rate / 10)


def clipped_adam(learning_rate):
    clip = optax.clip_by_global_norm(10 * learning_rate)
    return optax.chain(clip, adam(learning_rate))


def centralized_adam(learning_rate):
    return optax.chain(optax.centralize(), adam(learning_rate))


def accumulated_adam(learning_rate):
    return optax.MultiSteps(clipped_adam(learning_rate), 2)


USUAL = [optax.sgd, clipped_adam]
OTHERS = [
    *(optax.adabelief, optax.adafactor, optax.adan, optax.lamb, optax.lars),
    *(optax.novograd, optax.radam, optax.contrib.muon),
    *(centralized_adam, accumulated_adam),
]
optimizers = pytest.mark.parametrize(
    "optimizer", [*USUAL, *(pytest.param(o, marks=pytest.mark.slow) for o in OTHERS)]
)
# The first step is the one most often skipped, and a count of 0 is divided by.
BAD = (jnp.nan, 0.0, jnp.inf, 1.0)
GOOD = (0.0, 1.0)


def reached(learning_rate, wrap, optimizer, noises):
    """What training reaches; most of its numbers depend on the learning rate."""
    tx = wrap(optimizer(learning_rate))
    params = {
        "w": jnp.array([[1.0, -2.0], [0.5, 0.25]]) * 10 * learning_rate,
        "b": jnp.array([1.0, -2.0]),
    }

    def step(carry, noise):
        params, state = carry
        grads = jax.tree.map(lambda p: 4 * p**3 + noise, params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    if isinstance(noises, tuple):
        for noise in noises:
            carry, _ = step(carry, noise)
    else:
        carry, _ = jax.lax.scan(jax.checkpoint(step), carry, noises)
    return sum(jnp.sum(p**2) for p in jax.tree.leaves(carry[0]))


def unwrapped(tx):
    return tx


@pytest.mark.slow
@optimizers
def test_derivatives_through_skipped_steps_are_finite_and_right(optimizer):
    """Meta-learning: the derivative of what training reaches by the learning rate."""
    derivative = jax.jit(jax.grad(reached), static_argnums=(1, 2, 3))
    ours = derivative(0.1, ls.with_loss_scaling, optimizer, BAD)
    theirs = derivative(0.1, unwrapped, optimizer, GOOD)
    assert np.isfinite(ours)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


LOOP, SCAN = BAD, jnp.array(BAD)
DERIVATIVES = {
    "eager": (LOOP, jax.grad),
    "compiled inside": (LOOP, lambda f: jax.grad(jax.jit(f))),
    "forward": (SCAN, jax.jacfwd),
    "reverse": (SCAN, jax.grad),
    "linearized": (SCAN, lambda f: lambda x: jax.linearize(f, x)[1](1.0)),
    "mapped": (SCAN, lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x]))),
    "of second order": (SCAN, jax.hessian),
}


@pytest.mark.slow
@pytest.mark.parametrize("noises, derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_of_every_kind_are_those_without_the_skipped_steps(
    noises, derivative
):
    def of(wrap, noises):
        f = functools.partial(reached, wrap=wrap, optimizer=clipped_adam, noises=noises)
        return derivative(f)(jnp.float32(0.1))

    ours, theirs = of(ls.with_loss_scaling, noises), of(unwrapped, GOOD)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_reverse_mode_through_the_overflow_itself_is_nan():
    """As the guide says: 0, which the mask gives back, times the infinity."""

    def reached(x):
        tx = ls.with_loss_scaling(optax.sgd(0.1))
        updates, _ = tx.update(jnp.inf * x, tx.init(x), x)
        return optax.apply_updates(x, updates)

    assert jax.jit(jax.jacfwd(reached))(1.0) == 1.0
    assert jnp.isnan(jax.jit(jax.grad(reached))(1.0))


def test_debug_nans_is_silent_inside_a_jitted_skipped_step():
    grads = {"w": jnp.full((2, 2), jnp.nan), "b": jnp.zeros(2)}
    state = TX.init(PARAMS)
    with jax.debug_nans(True):
        updates, state = jax.jit(TX.update)(grads, state, PARAMS)
    assert_no_update(updates)


SEARCHES = {
    "zoom": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(0.1), optax.scale_by_backtracking_linesearch(1000)
    ),
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("jit", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_a_skipped_step_no_line_search_is_made(search, jit):
    """Whatever it is given: it would go on to its last evaluation on NaN."""
    evaluated = []

    def value_fn(params, factor):
        jax.debug.callback(lambda: evaluated.append(1))
        return factor * jnp.sum(params**2)

    tx = ls.with_loss_scaling(search)
    params, bad = jnp.array([1.0, 2.0]), jnp.array([1.0, jnp.nan])
    state = tx.init(params)

    def update(grads, state, **extra_args):
        return tx.update(grads, state, params, value_fn=value_fn, **extra_args)

    step = jax.jit(update) if jit else update
    # Uncompiled, the search is begun, but ends at once where the loss is finite.
    for factor in (1.0, jnp.nan) if jit else (1.0,):
        for value in (5.0, jnp.nan):
            for grad in (2 * params, bad):
                given = {"value": jnp.float32(value), "grad": grad, "factor": factor}
                updates, new_state = step(bad, state, **given)
                assert_no_update(updates)
                assert_same_bits(new_state.inner_state, state.inner_state)
    jax.effects_barrier()
    assert len(evaluated) <= (0 if jit else 4)


def test_checkify_finds_no_division_by_zero_in_a_skipped_first_step():
    grads = {"w": jnp.full((2, 2), jnp.nan), "b": jnp.zeros(2)}
    checked = checkify.checkify(TX.update, errors=checkify.div_checks)
    error, _ = jax.jit(checked)(grads, TX.init(PARAMS), PARAMS)
    assert error.get() is None
