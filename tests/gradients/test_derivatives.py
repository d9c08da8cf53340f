"""First and second derivatives are those of plain JAX, however they are computed."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import slow_but
from training import normal

import optax_lossscale as ls

SCALE = 2.0**10
RULE = ls.FixedLossScale(SCALE)
X, P, V = (normal(4, seed=i) for i in range(3))


def loss_fn(p, lam, x, dtype=jnp.float32):
    """No derivative of it up to the third vanishes."""
    p, x = p.astype(dtype), x.astype(dtype)
    fit = jnp.sum(jnp.square(jnp.sin(p * x) - jnp.asarray(1.0, dtype)))
    return fit.astype(jnp.float32) + lam * jnp.sum(jnp.exp(p).astype(jnp.float32))


def retried(fun, state, **options):
    fun = ls.value_and_grad_with_retries(fun, state, **options)
    return lambda *args: fun(*args)[1]


def scaled(fun):
    return ls.scale_backward(fun, SCALE)


def updated(fun):
    """The gradient, out of the step of an optimizer."""
    tx = ls.with_loss_scaling(optax.sgd(1.0), RULE)

    def gradient(p, *args):
        state = tx.init(p)
        _, grads = ls.value_and_grad(fun, state)(p, *args)
        return -tx.update(grads, state, p)[0]

    return gradient


# What the gradient of a loss is computed by.
WAYS = {
    "value_and_grad": lambda f: lambda *a: ls.value_and_grad(f, RULE.init())(*a)[1],
    "grad": lambda f: ls.grad(f, RULE.init()),
    "scale_backward": lambda f: jax.grad(scaled(f)),
    "checkpoint around it": lambda f: jax.grad(jax.checkpoint(scaled(f))),
    "checkpoint inside it": lambda f: jax.grad(scaled(jax.checkpoint(f))),
    "scale_block": lambda f: jax.grad(ls.scale_block(f)),
    "a step": updated,
}


def unrolled(gradient, lam):
    """The loss after three steps, by how much they decay."""

    def step(p, _):
        return p - 0.1 * gradient(p, lam, X), None

    return loss_fn(jax.lax.scan(step, P, length=3)[0], 0.0, X)


# Derivatives of a gradient, a function of a way.
DERIVATIVES = {
    "first": lambda way, loss: way(loss)(P, 1.0, X),
    "argument": lambda way, loss: jax.grad(
        lambda lam: way(loss)(P, lam, X) @ V, argnums=0
    )(1.0),
    "closed over": lambda way, loss: jax.grad(
        lambda lam: way(lambda p: loss(p, lam, X))(P) @ V
    )(1.0),
    "data": lambda way, loss: jax.grad(lambda x: way(loss)(P, 1.0, x) @ V)(X),
    "reverse over reverse": lambda way, loss: jax.jacrev(
        lambda p: way(loss)(p, 1.0, X)
    )(P),
    "forward over reverse": lambda way, loss: jax.jacfwd(
        lambda p: way(loss)(p, 1.0, X)
    )(P),
    "hvp": lambda way, loss: jax.jvp(
        lambda p, lam: way(loss)(p, lam, X), (P, 1.0), (V, 0.5)
    )[1],
    "unrolled": lambda way, loss: jax.grad(functools.partial(unrolled, way(loss)))(0.3),
}
PLACES = {"eager": lambda f: f, "jit": jax.jit}


@functools.cache
def derivatives(way, loss, place="jit", names=tuple(DERIVATIVES)):
    """Those of a way. Those of plain JAX are compiled once for all tests."""
    return PLACES[place](lambda: {x: DERIVATIVES[x](way, loss) for x in names})()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", slow_but(["jit"], PLACES))
def test_derivatives_are_those_of_plain_jax(way, place):
    ours, theirs = (derivatives(w, loss_fn, place) for w in (WAYS[way], jax.grad))
    chex.assert_trees_all_close(ours, theirs, rtol=2e-5, atol=1e-6)


half_loss = functools.partial(loss_fn, dtype=jnp.float16)
IN_FLOAT16 = ("first", "argument", "data", "reverse over reverse", "hvp")


@pytest.mark.parametrize("way", slow_but(["scale_backward"], WAYS))
def test_derivatives_are_those_of_plain_jax_in_float16(way):
    ours, theirs = (
        derivatives(w, half_loss, names=IN_FLOAT16) for w in (WAYS[way], jax.grad)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=0.02, atol=0.02)


@jax.custom_vjp
def with_auxiliary_loss(x, p):
    return x


with_auxiliary_loss.defvjp(lambda x, p: (x, p), lambda p, g: (g, jnp.ones_like(p)))


def test_a_rule_that_is_not_linear_depends_on_the_scale():
    """What it adds is divided by the scale, and `scale_block` has one of its own."""

    def loss_fn(p):
        return with_auxiliary_loss(jnp.sum(p**2), 3.0 * p)

    def gradient(loss_fn):
        return jax.jit(ls.grad(loss_fn, RULE.init()))(p)

    p = np.float32([1.0, 2.0])
    np.testing.assert_array_equal(gradient(loss_fn), 2.0 * p + 3.0 / SCALE)
    grads = gradient(ls.scale_block(loss_fn))
    assert not np.allclose(grads, 2.0 * p + 3.0, rtol=0.1)


def test_retries_are_a_loop_which_has_no_derivative_in_reverse_mode():
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda p: jnp.sum(retried(loss_fn, RULE.init())(p, 1.0, X)))(P)


@pytest.mark.parametrize(
    "way", [*WAYS.values(), lambda f: retried(f, RULE.init())], ids=[*WAYS, "retries"]
)
def test_no_tracer_outlives_its_trace(way):
    with jax.check_tracer_leaks():
        jax.make_jaxpr(lambda p: way(lambda p: loss_fn(p, 1.0, X))(p))(P)
