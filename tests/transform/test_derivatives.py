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
    return ls.with_loss_scaling(tx, check_updates=True)


def copied(tx):
    return ls.with_loss_scaling(ls.with_master_weights(tx))


KINDS = {
    "reverse": lambda f: jax.jit(jax.grad(f)),
    "reverse, eager": jax.grad,
    "forward": lambda f: jax.jit(jax.jacfwd(f)),
    "of second order": lambda f: jax.jit(jax.hessian(f)),
}


@functools.cache
def derivative(kind, in_scan, make, start, dtype, wrap=lambda tx: tx):
    """Of what training on batches reaches, by the learning rate."""

    def step(tx, carry, batch):
        (params, state), (noise, factor) = carry, batch
        grads = factor * params.astype(jnp.float32) ** 3 + noise
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def reached(rate, batches):
        tx, scale = wrap(make(rate)), rate if start == "learned" else 0.1
        params = jnp.asarray(np.float32([[10, -20], [5, 2.5]]) * scale, dtype)
        carry, body = (params, tx.init(params)), functools.partial(step, tx)
        if in_scan:
            carry, _ = jax.lax.scan(jax.checkpoint(body), carry, batches)
        for batch in () if in_scan else batches:
            carry, _ = body(carry, batch)
        return jnp.sum(carry[0].astype(jnp.float32) ** 2)

    return KINDS[kind](reached)


# The optimizer, its wrapper, the start, noise and factors of the gradients, and the
# applied steps. The parameters are float16 where they are copied. A start that is
# learned, as in meta-learning, depends on the learning rate, too. A batch with an
# infinite factor is bad to the derivative of its own gradients, too.
ROWS = {
    "adam": (adam, scaled, "learned", [NAN, 0, INF, 1], 4.0, [1, 3]),
    "checked": (exponential, checked, "learned", [1e4, 0, 1e4, 1], 4.0, [1, 3]),
    "master weights": (optax.sgd, copied, "learned", [0, NAN, 0, 0], 0.1, [0, 2, 3]),
    "later infinite factor": (optax.sgd, scaled, "given", 0, [0.1, INF, 0.2], [0, 2]),
    "first infinite factor": (optax.sgd, scaled, "given", 0, [INF, 0.1, 0.2], [1, 2]),
}
LATER = "later infinite factor"
QUICK = [(row, "reverse", "scan") for row in ROWS if row != LATER]
QUICK += [(LATER, "forward", "scan")]
CASES = [*itertools.product(ROWS, KINDS, ("scan", "loop"))]
NOT_FORWARD = [case for case in CASES if case[0] == LATER and case[1] != "forward"]
CASES = [case for case in CASES if case not in NOT_FORWARD]


def derivative_of(case, wrapped):
    """Of a wrapped optimizer on all batches, or of the bare one on those applied."""
    row, kind, place = case
    make, wrap, start, noises, factors, applied = ROWS[row]
    batches = np.stack(np.broadcast_arrays(noises, factors), 1).astype(np.float32)
    options = ("float16" if wrap is copied else "float32", wrap)
    if not wrapped:
        options, batches = ("float32",), batches[applied]
    function = derivative(kind, place == "scan", make, start, *options)
    return function(np.float32(0.1), batches)


@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids=" ".join)
def test_derivative_leaves_out_skipped_steps(case):
    ours, theirs = (derivative_of(case, wrapped) for wrapped in (True, False))
    assert np.isfinite(ours) and np.abs(theirs) > 1e-3
    # What goes back through float16 parameters is rounded to float16.
    rtol = 2e-2 if case[0] == "master weights" else 1e-4
    np.testing.assert_allclose(ours, theirs, rtol)


@pytest.mark.slow
@pytest.mark.parametrize("case", NOT_FORWARD, ids=" ".join)
def test_reverse_mode_is_nan_after_a_later_batch_with_an_infinite_derivative(case):
    """A limit. The parameters of the first batch do not depend on the rate."""
    assert np.isnan(derivative_of(case, wrapped=True))


def after_training(wrap, in_scan, rate):
    """Parameters of which one is in no gradient, so that its moments stay 0."""
    tx = wrap(optax.adam(rate))

    def step(carry, _):
        params, state = carry
        grads = jax.grad(lambda p: jnp.sum(jnp.sin(p["w"])))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = {"w": jnp.array([1.0, 2.0]), "unused": jnp.ones(2)}
    carry = params, tx.init(params)
    if in_scan:
        carry, _ = jax.lax.scan(step, carry, length=3)
    for _ in range(0 if in_scan else 3):
        carry, _ = step(carry, None)
    return sum(map(jnp.sum, jax.tree.leaves(carry[0])))


AROUND = {
    "forward": jax.jacfwd,
    "forward, compiled": lambda f: jax.jit(jax.jacfwd(f)),
    "reverse, compiled": lambda f: jax.jit(jax.grad(f)),
    "forward of reverse": jax.hessian,
    "reverse of forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "vmap": lambda f: lambda rate: jax.vmap(jax.jacfwd(f))(rate[None])[0],
}
WRAPPERS = {"scaled": scaled, "checked": checked}
QUICK = [("forward", "scaled", "scan"), ("forward, compiled", "scaled", "loop")]
MOVING = [*itertools.product(AROUND, WRAPPERS, ("scan", "loop"))]


@pytest.mark.parametrize("case", slow_but(QUICK, MOVING), ids=" ".join)
def test_moment_that_stays_0_has_the_derivative_of_optax(case):
    """Zeros in the place of no derivative would be NaN behind a square root."""
    kind, name, place = case
    ours, theirs = (
        AROUND[kind](functools.partial(after_training, wrap, place == "scan"))(
            np.float32(0.1)
        )
        for wrap in (WRAPPERS[name], lambda tx: tx)
    )
    np.testing.assert_allclose(ours, theirs, 1e-3)


def test_inner_direction_that_reaches_no_result_leaves_the_outer_derivative_finite():
    """The optimizer ignores ``value``, so ``x`` moves only the last term."""
    w, tx = jnp.array([1.0, 2.0]), scaled(optax.sgd(0.1, momentum=0.9))

    def fun(x, y):
        updates, _ = tx.update(y * w, tx.init(w), w, value=x)
        return jnp.sum(jnp.sqrt(updates * updates)) + x

    along_x = jax.jacfwd(fun)
    of_both = jax.jit(lambda x, y: jax.jvp(lambda y: along_x(x, y), (y,), (1.0,))[0])
    assert of_both(1.0, 0.0) == 1
