"""Every way to compute gradients gives those of plain JAX."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState
from shared import enable_x64, slow_but
from training import normal

import optax_lossscale as ls

RULE = ls.FixedLossScale(2.0**10)
STATE = RULE.init()
X, P, V = (normal(4, seed=i) for i in range(3))


def by_hand(fun):
    scaled = jax.grad(lambda *args, **named: ls.scale_loss(fun(*args, **named), STATE))
    return lambda *args, **named: ls.unscale_grads(scaled(*args, **named), STATE)


def by_retries(fun):
    fun = ls.value_and_grad_with_retries(fun, STATE)
    return lambda *args, **named: fun(*args, **named)[1]


def by_keyword(fun):
    block = ls.scale_block(fun)
    return jax.grad(lambda p, **named: block(p=p, **named))


def by_a_step(fun):
    """The gradient, out of the step of an optimizer."""
    tx = ls.with_loss_scaling(optax.sgd(1.0), RULE)

    def gradient(p, *args, **named):
        state = tx.init(p)
        _, grads = ls.value_and_grad(fun, state)(p, *args, **named)
        return -tx.update(grads, state, p)[0]

    return gradient


scale_backward = functools.partial(ls.scale_backward, scale=2.0**10)
WAYS = {
    "value_and_grad": lambda f: lambda *a, **k: ls.value_and_grad(f, STATE)(*a, **k)[1],
    "grad": lambda f: ls.grad(f, STATE),
    "by hand": by_hand,
    "retries": by_retries,
    "scale_backward": lambda f: jax.grad(ls.scale_backward(f, STATE)),
    "scale_block": lambda f: jax.grad(ls.scale_block(f)),
}
TWICE = {  # All but the loop of retries have second derivatives.
    **{name: way for name, way in WAYS.items() if way is not by_retries},
    "checkpoint around it": lambda f: jax.grad(jax.checkpoint(scale_backward(f))),
    "checkpoint inside it": lambda f: jax.grad(scale_backward(jax.checkpoint(f))),
    "a step": by_a_step,
}


def loss_fn(p, lam, x, dtype=jnp.float32):
    """No derivative of it up to the third vanishes."""
    p, x = p.astype(dtype), x.astype(dtype)
    fit = jnp.sum(jnp.square(jnp.sin(p * x) - jnp.asarray(1.0, dtype)))
    return fit.astype(jnp.float32) + lam * jnp.sum(jnp.exp(p).astype(jnp.float32))


def unrolled(gradient, lam):
    """The loss after three steps, by how much they decay."""

    def step(p, _):
        return p - 0.1 * gradient(p, lam, X), None

    return loss_fn(jax.lax.scan(step, P, length=3)[0], 0.0, X)


@functools.cache
def derivatives(way, dtype, jit=jax.jit):
    """Those of a way. Those of plain JAX are compiled once for all tests."""
    loss = functools.partial(loss_fn, dtype=dtype)
    gradient = way(loss)

    def closed_over(lam):
        return way(lambda p: loss(p, lam, X))(P) @ V

    def all_derivatives():
        yield gradient(P, 1.0, X)
        yield jax.grad(lambda lam: gradient(P, lam, X) @ V)(1.0)
        yield jax.grad(closed_over)(1.0)
        yield jax.grad(lambda x: gradient(P, 1.0, x) @ V)(X)
        yield jax.jacrev(lambda p: gradient(p, 1.0, X))(P)
        yield jax.jacfwd(lambda p: gradient(p, 1.0, X))(P)
        yield jax.jvp(lambda p, lam: gradient(p, lam, X), (P, 1.0), (V, 0.5))[1]
        if dtype == "float32":
            yield jax.grad(functools.partial(unrolled, gradient))(0.3)

    return jit(lambda: [*all_derivatives()])()


PLACES = {
    "jit": ("float32", jax.jit),
    "float16": ("float16", jax.jit),
    "eager": ("float32", lambda f: f),
}
QUICK = [*((way, "jit") for way in TWICE), ("scale_backward", "float16")]


CASES = slow_but(QUICK, itertools.product(TWICE, PLACES))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_derivatives_are_those_of_jax(case):
    way, place = case
    ours, theirs = (derivatives(x, *PLACES[place]) for x in (TWICE[way], jax.grad))
    rtol, atol = (0.02, 0.02) if place == "float16" else (2e-5, 1e-6)
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("way", [*TWICE.values(), by_retries], ids=[*TWICE, "retries"])
def test_no_tracer_outlives_its_trace(way):
    with jax.check_tracer_leaks():
        jax.make_jaxpr(lambda p: way(lambda p: loss_fn(p, 1.0, X))(p))(P)


@pytest.mark.parametrize("name", ["scale", "state", "fun", "args", "loss", "tree"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_loss_may_have_keywords_of_any_name(way, name):
    fun = way(lambda w, **named: named[name] * w)
    jax.eval_shape(functools.partial(fun, 2.0, **{name: 3.0}))


TYPES = dict.fromkeys(["float16", "float8_e5m2", "float8_e4m3fn"], "float32")
for name in ("bfloat16", "float32", "float64", "complex64", "complex128"):
    TYPES[name] = name


@pytest.mark.parametrize(("dtype", "expected"), TYPES.items())
def test_gradients_have_the_type_of_the_parameter_or_float32(dtype, expected):
    def loss_fn(w):
        return jnp.sum(jnp.abs(w.astype(expected))) * 2.0**-11

    def array(numbers, dtype):
        return np.array(numbers).astype(jnp.dtype(dtype))

    with enable_x64(True):
        ways = [WAYS[x] for x in ("value_and_grad", "grad", "by hand", "retries")]
        all_grads = jax.jit(lambda w: [way(loss_fn)(w) for way in ways])
        for grads in all_grads(array([2.0, -0.5], dtype)):
            assert_same_bits(grads, array([2.0**-11, -(2.0**-11)], expected))


@jax.custom_vjp
def with_auxiliary_loss(x, p):
    return x


with_auxiliary_loss.defvjp(lambda x, p: (x, p), lambda p, g: (g, jnp.ones_like(p)))


def test_rule_that_is_not_linear_depends_on_the_scale():
    """What it adds is divided by the scale, and `scale_block` has one of its own."""

    def loss_fn(p):
        return with_auxiliary_loss(jnp.sum(p**2), 3.0 * p)

    def gradient(loss_fn):
        return jax.jit(ls.grad(loss_fn, STATE))(p)

    p = np.float32([1.0, 2.0])
    np.testing.assert_array_equal(gradient(loss_fn), 2.0 * p + 3.0 * 2.0**-10)
    grads = gradient(ls.scale_block(loss_fn))
    assert not np.allclose(grads, 2.0 * p + 3.0, rtol=0.1)


OVERWRITTEN = "_overwrite_with_gradient"
FLOAT8 = {
    "params": {"w": np.ones(3, np.float32)},
    OVERWRITTEN: {"layer": {"history": np.float32([1, 2])}},
}


@jax.custom_vjp
def observed(x, history):
    return x


def backward(x, cotangent):
    """The new value of the history, as of a type that is its own."""
    return cotangent, jnp.stack([cotangent[0] * x[0], 7.0 + 0 * x[0]])


observed.defvjp(lambda x, history: (x, x), backward)
OVERWRITES = {**WAYS, "by keyword": by_keyword}
EAGER = {f"{name}, eager": way for name, way in OVERWRITES.items()}


@pytest.mark.parametrize(
    "way", slow_but([*OVERWRITES, "value_and_grad, eager"], [*OVERWRITES, *EAGER])
)
def test_overwrites_are_not_divided_and_never_nonfinite(way):
    """As Flax's float8 layers do, they put a value into the place of a gradient."""

    def loss_fn(p, factor):
        [history] = jax.tree.leaves(p[OVERWRITTEN])
        return jnp.sum(observed(factor * p["params"]["w"], history))

    gradient = EAGER[way] if way in EAGER else lambda f: jax.jit(OVERWRITES[way](f))
    is_block = "block" in way or "keyword" in way
    scale = 512.0 if is_block else 1024.0  # a block chooses for a loss
    # By hand, nothing of this package calls the loss, and can keep the old value.
    kept = [np.nan, np.nan] if "hand" in way else [1.0, 2.0]
    for factor, expected in ((1.0, [scale, 7.0]), (np.nan, kept)):
        grads = gradient(loss_fn)(FLOAT8, factor=factor)
        [new] = jax.tree.leaves(grads[OVERWRITTEN])
        np.testing.assert_array_equal(new, expected)
        np.testing.assert_array_equal(grads["params"]["w"], factor * np.ones(3))


@pytest.mark.slow
def test_float8_layers_of_flax_train_through_a_bad_batch():
    # Not in float16, where the products of Flax's layers overflow forward.
    dense = functools.partial(nn.Dense, dot_general_cls=Fp8DirectDotGeneralOp)
    net = nn.Sequential([nn.relu, dense(32), nn.relu, dense(8)])
    x = jax.random.normal(jax.random.key(0), (64, 16))
    state = TrainState.create(
        apply_fn=net.apply,
        params=net.init(jax.random.key(1), x),  # with all collections
        tx=ls.with_loss_scaling(optax.adam(1e-2)),
    )

    @jax.jit
    def step(state, weight):
        def loss_fn(params):
            return weight * jnp.mean((net.apply(params, x) - jnp.sin(x[:, :8])) ** 2)

        loss, grads = ls.value_and_grad(loss_fn, state)(state.params)
        return state.apply_gradients(grads=grads), loss

    for i in range(200):
        state, loss = step(state, jnp.inf if i == 50 else 1.0)
    assert loss < 0.05 and ls.all_finite(state.params)
    assert ls.get_loss_scale_state(state).skipped_steps == 1
