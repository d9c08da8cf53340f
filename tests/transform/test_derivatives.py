"""Derivatives of what training reaches are those without the skipped steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import slow_but

import optax_lossscale as ls

INF, NAN = np.inf, np.nan


def adam(rate):
    """Most of its numbers depend on the learning rate."""
    clip = optax.clip_by_global_norm(10 * rate)
    return optax.chain(clip, optax.adam(rate, b2=1 - rate / 10))


def exponential(rate):
    """A zero that goes back through an infinite exponential would be NaN."""
    exp = optax.stateless(lambda g, params: jax.tree.map(jnp.exp, g))
    return optax.chain(exp, optax.sgd(rate, momentum=0.9))


def checked(tx):
    return ls.with_loss_scaling(tx, check_updates=True)


def copied(tx):
    return ls.with_loss_scaling(ls.with_master_weights(tx))


KINDS = {
    "reverse": lambda f: jax.jit(jax.grad(f)),
    "reverse, eager": jax.grad,
    "forward": jax.jacfwd,
    "of second order": jax.hessian,
}


def derivative(
    kind, make, batches, in_scan, dtype=jnp.float32, start=lambda rate: rate
):
    """By the learning rate, of what training reaches."""

    def step(tx, carry, batch):
        (params, state), (noise, factor) = carry, batch
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        grads = jax.tree.map(lambda p: factor * p**3 + noise, wide)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def reached(rate):
        tx, first = make(rate), jnp.array([[10.0, -20.0], [5.0, 2.5]]) * start(rate)
        params = {"w": first.astype(dtype), "b": jnp.ones(2, dtype)}
        carry, body = (params, tx.init(params)), functools.partial(step, tx)
        if in_scan:
            carry, _ = jax.lax.scan(jax.checkpoint(body), carry, jnp.array(batches))
        for batch in () if in_scan else batches:
            carry, _ = body(carry, batch)
        leaves = jax.tree.leaves(carry[0])
        return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in leaves)

    return KINDS[kind](reached)(jnp.float32(0.1))


# The optimizer and its wrapper, noise and factors of the gradients, the applied steps.
ROWS = {
    "adam": (adam, ls.with_loss_scaling, [NAN, 0, INF, 1], 4.0, [1, 3]),
    "checked": (exponential, checked, [1e4, 0, 1e4, 1], 4.0, [1, 3]),
    "master weights": (optax.sgd, copied, [0, NAN, 0, 0], 0.1, [0, 2, 3]),
}


@pytest.mark.parametrize("in_scan", slow_but([True], [True, False]))
@pytest.mark.parametrize("kind", slow_but(["reverse"], KINDS))
@pytest.mark.parametrize("row", ROWS)
def test_derivative_is_that_without_the_skipped_steps(row, kind, in_scan):
    """Meta-learning: the start depends on the learning rate, too."""
    make, wrap, noises, factor, applied = ROWS[row]
    dtype = jnp.float16 if row == "master weights" else jnp.float32
    batches = np.float32([(noise, factor) for noise in noises])
    ours = derivative(kind, lambda rate: wrap(make(rate)), batches, in_scan, dtype)
    theirs = derivative(kind, make, batches[applied], in_scan)
    assert np.isfinite(ours).all() and abs(theirs) > 1e-3
    # What goes back through float16 parameters is rounded to float16.
    rtol = 1e-4 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(ours, theirs, rtol=rtol)


def guarded_sgd(rate):
    return ls.with_loss_scaling(optax.sgd(rate))


@pytest.mark.parametrize(
    ("kind", "factors", "is_nan"),
    [
        ("reverse", [0.1, INF, 0.2], True),
        ("forward", [0.1, INF, 0.2], False),
        ("reverse", [INF, 0.1, 0.2], False),
    ],
)
def test_reverse_mode_through_a_later_bad_batch_is_nan(kind, factors, is_nan):
    """The batch is bad to the derivative of its own gradients."""

    def of(make, factors):
        batches = [(0, factor) for factor in factors]
        return derivative(kind, make, batches, in_scan=False, start=lambda _: 0.1)

    expected = NAN if is_nan else of(optax.sgd, [0.1, 0.2])
    np.testing.assert_allclose(of(guarded_sgd, factors), expected, rtol=1e-6)
