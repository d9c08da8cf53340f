"""Derivatives of what training reaches are those without the skipped steps."""

import functools
import itertools

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


scaled = ls.with_loss_scaling


def checked(tx):
    return scaled(tx, check_updates=True)


def copied(tx):
    return scaled(ls.with_master_weights(tx))


KINDS = {
    "reverse": lambda f: jax.jit(jax.grad(f)),
    "reverse, eager": jax.grad,
    "forward": lambda f: jax.jit(jax.jacfwd(f)),
    "of second order": lambda f: jax.jit(jax.hessian(f)),
}


def derivative(kind, make, batches, in_scan, dtype, start):
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


def learned(rate):
    """Meta-learning: the start depends on the learning rate, too."""
    return rate


def given(rate):
    return 0.1


# The optimizer, its wrapper, the start, noise and factors of the gradients, and the
# applied steps. A batch with an infinite factor is bad to the derivative of its own
# gradients, too.
ROWS = {
    "adam": (adam, scaled, learned, [NAN, 0, INF, 1], 4.0, [1, 3]),
    "checked": (exponential, checked, learned, [1e4, 0, 1e4, 1], 4.0, [1, 3]),
    "master weights": (optax.sgd, copied, learned, [0, NAN, 0, 0], 0.1, [0, 2, 3]),
    "bad factor": (optax.sgd, scaled, given, 0, [0.1, INF, 0.2], [0, 2]),
    "bad factor first": (optax.sgd, scaled, given, 0, [INF, 0.1, 0.2], [1, 2]),
}
QUICK = [*((row, "reverse", True) for row in ROWS), ("bad factor", "forward", True)]
CASES = itertools.product(ROWS, KINDS, (True, False))


@pytest.mark.parametrize(
    "case", slow_but(QUICK, CASES), ids=lambda x: " ".join(map(str, x))
)
def test_derivative_leaves_out_skipped_steps(case):
    """But reverse mode cannot pass a later batch whose derivative is not finite."""
    row, kind, in_scan = case
    make, wrap, start, noises, factors, applied = ROWS[row]
    dtype = jnp.float16 if row == "master weights" else jnp.float32
    batches = np.stack(np.broadcast_arrays(noises, factors), 1).astype(np.float32)

    def wrapped(rate):
        return wrap(make(rate))

    ours = derivative(kind, wrapped, batches, in_scan, dtype, start)
    if row == "bad factor" and kind != "forward":
        assert np.isnan(ours)
        return
    theirs = derivative(kind, make, batches[applied], in_scan, jnp.float32, start)
    assert np.isfinite(ours).all() and abs(theirs) > 1e-3
    # What goes back through float16 parameters is rounded to float16.
    rtol = 1e-4 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(ours, theirs, rtol=rtol)
