"""Derivatives of what training reaches are those without the skipped steps."""

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


def reached(rate, make, wrap, noises, factors, in_scan, dtype, start=0.1):
    """What training reaches, which depends on the learning rate all along."""
    tx = wrap(make(rate))
    params = {"w": jnp.array([[10.0, -20.0], [5.0, 2.5]]) * start, "b": jnp.ones(2)}
    params = jax.tree.map(lambda p: p.astype(dtype), params)

    def step(carry, batch):
        (params, state), (noise, factor) = carry, batch
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        grads = jax.tree.map(lambda p: factor * p**3 + noise, wide)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    carry, batches = (params, tx.init(params)), np.float32([noises, factors]).T
    if in_scan:
        carry = jax.lax.scan(jax.checkpoint(step), carry, jnp.array(batches))[0]
    else:
        for batch in batches:
            carry, _ = step(carry, batch)
    return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(carry[0]))


KINDS = {
    "reverse": lambda f: jax.jit(jax.grad(f)),
    "reverse, eager": jax.grad,
    "forward": jax.jacfwd,
    "of second order": jax.hessian,
}
FOUR = [4.0] * 4
# The optimizer and its wrapper, noise and factors of the gradients, the applied steps.
ROWS = {
    "adam": (adam, ls.with_loss_scaling, [NAN, 0, INF, 1], FOUR, [1, 3]),
    "checked": (exponential, checked, [1e4, 0, 1e4, 1], FOUR, [1, 3]),
    "master weights": (optax.sgd, copied, [0, NAN, 0, 0], [0.1] * 4, [0, 2, 3]),
}


@pytest.mark.parametrize("in_scan", slow_but([True], [True, False]))
@pytest.mark.parametrize("kind", slow_but(["reverse"], KINDS))
@pytest.mark.parametrize("row", ROWS)
def test_derivative_is_that_without_the_skipped_steps(row, kind, in_scan):
    """Meta-learning: the derivative by the learning rate."""
    make, wrap, noises, factors, applied = ROWS[row]
    dtype = jnp.float16 if row == "master weights" else jnp.float32

    def of(wrap, noises, factors, dtype):
        options = make, wrap, noises, factors, in_scan, dtype
        return KINDS[kind](lambda rate: reached(rate, *options, start=rate))(
            jnp.float32(0.1)
        )

    noises, factors = np.float32([noises, factors])
    ours = of(wrap, noises, factors, dtype)
    theirs = of(lambda tx: tx, noises[applied], factors[applied], jnp.float32)
    assert np.isfinite(ours).all() and abs(theirs) > 1e-3
    # What goes back through float16 parameters is rounded to float16.
    rtol = 1e-4 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(ours, theirs, rtol=rtol)


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

    def of(wrap, factors):
        options = optax.sgd, wrap, [0] * len(factors), factors, False, jnp.float32
        return KINDS[kind](lambda rate: reached(rate, *options))(0.1)

    expected = np.nan if is_nan else of(lambda tx: tx, [0.1, 0.2])
    actual = of(ls.with_loss_scaling, factors)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
