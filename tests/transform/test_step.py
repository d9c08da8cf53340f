"""Whole steps: donation, transfers, derivatives, line searches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits
from shared import slow_but
from training import float16_loss, make_step, normal, train

import optax_lossscale as ls

TX = ls.with_loss_scaling(optax.adam(1e-2))
PARAMS = {"w": np.float32([[0.5, -1.0], [2.0, 0.25]]), "b": np.zeros(2, np.float32)}
X = jax.device_put(normal(8, 2))
STEP = make_step(TX, float16_loss)


@jax.jit
def start():
    return jax.tree.map(jnp.asarray, PARAMS), TX.init(PARAMS)


def test_a_donated_state_is_used():
    params, state = start()
    jax.jit(STEP, donate_argnums=(0, 1))(params, state, X)
    used = jax.tree.leaves((params, state.inner_state))
    assert all(x.is_deleted() for x in used)


def test_a_whole_train_step_holds_under_the_transfer_guard():
    params, state = start()
    with jax.transfer_guard("disallow"):
        train(jax.jit(STEP), params, state, [X] * 3)


@pytest.mark.parametrize(
    "ask",
    [
        *(ls.all_finite, ls.max_magnitude, ls.get_loss_scale, ls.was_applied),
        lambda state: ls.check_loss_scale(state, grads=[X]),
        lambda state: ls.keep_if_applied(state, {"mean": X}, {"mean": -X}),
    ],
)
def test_eager_questions_hold_under_the_transfer_guard(ask):
    state = start()[1]
    with jax.transfer_guard("disallow"):
        ask(state)


def reached(learning_rate, wrap, noises):
    """What training reaches; most of its numbers depend on the learning rate."""
    clip = optax.clip_by_global_norm(10 * learning_rate)
    adam = optax.adam(learning_rate, b2=1 - learning_rate / 10)
    tx = wrap(optax.chain(clip, adam))
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
    carry, _ = jax.lax.scan(jax.checkpoint(step), carry, jnp.array(noises))
    return sum(jnp.sum(p**2) for p in jax.tree.leaves(carry[0]))


DERIVATIVES = {
    "forward": jax.jacfwd,
    "reverse": lambda f: jax.jit(jax.grad(f)),
    "of second order": jax.hessian,
}


@pytest.mark.parametrize("kind", slow_but(("reverse",), DERIVATIVES))
def test_derivatives_are_those_without_the_skipped_steps(kind):
    """Meta-learning: the derivative of what training reaches by the learning rate.

    In a scan. Others test the same of loops: `test_outcome`, `test_optimizers`.
    """

    def of(wrap, *noises):
        f = functools.partial(reached, wrap=wrap, noises=noises)
        return DERIVATIVES[kind](f)(jnp.float32(0.1))

    ours = of(ls.with_loss_scaling, jnp.nan, 0.0, jnp.inf, 1.0)
    theirs = of(lambda tx: tx, 0.0, 1.0)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_reverse_mode_through_a_later_bad_batch_is_nan():
    def reached(batches, rate, wrap=ls.with_loss_scaling):
        tx = wrap(optax.sgd(rate))
        w, state = jnp.float32(0.5), tx.init(jnp.float32(0.5))
        for batch in batches:
            grad = jax.grad(lambda w, x: (x * w - 1) ** 2)(w, batch)
            updates, state = tx.update(grad, state, w)
            w = optax.apply_updates(w, updates)
        return w

    def of(derivative, *batches, **options):
        run = functools.partial(reached, batches, **options)
        return jax.jit(derivative(run))(0.1)

    theirs = of(jax.grad, 1.0, 2.0, wrap=lambda tx: tx)
    assert np.isnan(of(jax.grad, 1.0, jnp.inf, 2.0))
    for ours in (of(jax.jacfwd, 1.0, jnp.inf, 2.0), of(jax.grad, jnp.inf, 1.0, 2.0)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


SEARCHES = {
    "zoom": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(0.1), optax.scale_by_backtracking_linesearch(1000)
    ),
}


@pytest.mark.parametrize("search", slow_but(("backtracking",), SEARCHES))
def test_a_line_search_evaluates_its_loss_once_in_a_skipped_step(search):
    """Whatever it is given: it would go on to its last evaluation on NaN.

    In the very first step it may take some more.
    """
    evaluated = []

    def value_fn(params, factor):
        jax.debug.callback(lambda: evaluated.append(1))
        return factor * jnp.sum(params**2)

    tx = ls.with_loss_scaling(SEARCHES[search])
    params, bad = np.float32([1.0, 2.0]), np.float32([1.0, np.nan])

    @jax.jit
    def step(grads, state, **extra_args):
        return tx.update(grads, state, params, value_fn=value_fn, **extra_args)

    first = tx.init(params)
    good = {"value": np.float32(5.0), "grad": 2 * params, "factor": 1.0}
    _, second = step(2 * params, first, **good)
    for factor, value in np.float32([[1.0, 5.0], [1.0, np.nan], [np.nan, 5.0]]):
        given = {"value": value, "grad": bad, "factor": factor}
        for state in (first, second):
            jax.effects_barrier()
            evaluated.clear()
            updates, new_state = step(bad, state, **given)
            jax.effects_barrier()
            assert len(evaluated) <= 1 or state is first, given
            assert_no_update(updates)
            assert_same_bits(new_state.inner_state, state.inner_state)
