"""autocast: the products of any float32 program, and nothing else, in float16.

Random programs are compared with themselves, cast by hand at each product.
"""

import collections
import functools
import random

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_types
from devices import vary
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, on_mesh, set_mesh
from shared import enable_x64, slow_but
from training import normal

import optax_lossscale as ls

F16, F32 = jnp.float16, jnp.float32
N = 4
X = jnp.asarray(normal(N, N))


def products(program, found=None):
    """How many products a program holds, by the type of their operands."""
    found = collections.Counter() if found is None else found
    for eqn in program.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found[eqn.invars[0].aval.dtype.name] += 1
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                products(getattr(inner, "jaxpr", inner), found)
    return found


def products_of(fun, *args, **kwargs):
    return products(jax.make_jaxpr(fun)(*args, **kwargs).jaxpr)


# A product is a function of a product in some type: plain, or cast by hand.


def plain(product):
    return product


def by_hand(product):
    def cast(x, w):
        return product(x.astype(F16), w.astype(F16)).astype(F32)

    return cast


def convolved(cast):
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")

    return lambda x, w: cast(convolve)(x[None, None], w[None, None, :3, :3])[0, 0]


@jax.custom_jvp
def own_jvp(x, w):
    return jnp.sin(x @ w)


@own_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = x @ w
    return jnp.sin(y), jnp.cos(y) * (dx @ w + x @ dw)


@jax.custom_vjp
def own_vjp(x, w):
    return x @ w


own_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def in_bfloat16(x, w):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(F32)


def highest(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


def einsum(indices):
    return lambda x, w: jnp.einsum(indices, x, w)


PRODUCTS = {
    "product": lambda cast: cast(jnp.matmul),
    "einsum": lambda cast: cast(einsum("ij,kj->ki")),
    "batched": lambda cast: (
        lambda x, w: cast(einsum("ij,ijk->ik"))(x, jnp.stack([w] * N))
    ),
    "convolution": convolved,
}
# They are left as they are.
OTHERS = {
    "own jvp": own_jvp,
    "own vjp": own_vjp,
    "bfloat16": in_bfloat16,
    "highest": highest,
    "HIGH": functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGH),
    "add": jnp.add,
    "where": lambda x, w: jnp.where(x > w, x, 0.5 * w),
    "softmax": lambda x, w: jax.nn.softmax(4 * x) + w[:1],
    "norm": lambda x, w: x / jnp.sqrt(jnp.mean(x**2) + 1e-8),
    "relu": lambda x, w: jax.nn.relu(x) + w,
    "sum": lambda x, w: x + jnp.sum(w * x, axis=0, keepdims=True),
    "lookup": lambda x, w: w[jnp.argmax(x, axis=1)],
    "tanh": lambda x, w: jnp.tanh(x),
}
BLOCKS = {
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "dots saveable": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "scan": lambda f: (
        lambda x, w: jax.lax.scan(
            lambda x, w: (f(x, w), x[0]), x, jnp.stack([w, 0.5 * w])
        )[0]
    ),
    "cond": lambda f: lambda x, w: jax.lax.cond(x[0, 0] > 0, f, jnp.add, x, w),
    "while": lambda f: lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: f(x, w), x),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, w]), w)[0],
    "closure": lambda f: lambda x, w: jax.jit(lambda x: f(x, w))(x),
    "remat in scan": lambda f: BLOCKS["scan"](BLOCKS["checkpoint"](f)),
}


def random_program(rng, others, depth=2):
    """A function of a way to cast, which returns a function of two matrices."""
    names = [rng.choice([*PRODUCTS, *others, *BLOCKS]) for _ in range(3)]
    steps = []
    for name in [rng.choice([*PRODUCTS]), *names]:
        if name in BLOCKS and depth:
            inner = random_program(rng, others, depth - 1)
            steps.append(lambda cast, name=name, inner=inner: BLOCKS[name](inner(cast)))
        elif name in PRODUCTS:
            steps.append(PRODUCTS[name])
        else:
            steps.append(lambda cast, name=name: OTHERS.get(name, jnp.add))

    def program(cast):
        def run(x, w):
            for i, step in enumerate(steps):
                x = jnp.tanh(step(cast)(x, jnp.roll(w, i)))
            return x

        return run

    return program


def loss_of(program, cast):
    """A loss with all that arguments and results may be."""

    def loss_fn(params, x, *, flag=None, name="a string", steps=3):
        y = program(cast)(x, params["w"]) + params["b"][None]
        loss = jnp.mean(jnp.square(y)) + jnp.sum(jnp.asarray(steps, F32) * params["b"])
        return loss, {"y": y, "steps": steps, "none": flag, "name": name}

    return loss_fn


PARAMS = {"w": jnp.asarray(normal(N, N, seed=1)), "b": jnp.zeros(N)}


@pytest.mark.parametrize("seed", slow_but(range(1), range(24)))
def test_a_random_program_is_the_one_that_is_cast_by_hand(seed):
    has_jvp = seed % 2 == 0  # a ``custom_vjp`` has none
    others = [name for name in OTHERS if name != "own vjp" or not has_jvp]
    program = random_program(random.Random(seed), others)
    modes = random.Random(seed).choice(["none", "strict", "x64"])
    before = loss_of(program, plain)
    ours, theirs = ls.autocast(before), loss_of(program, by_hand)
    with (
        enable_x64(modes == "x64"),
        jax.numpy_dtype_promotion("strict" if modes == "strict" else "standard"),
        jax.numpy_rank_promotion("raise" if modes == "strict" else "allow"),
    ):
        steps = jnp.int32(3) if modes == "strict" else 3

        def everything(loss_fn, params, x):
            gradient = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)
            (_, aux), _ = result = gradient(params, x, steps=steps)
            aux.pop("name")
            if has_jvp:
                forward = jax.jvp(lambda x: loss_fn(params, x)[0], (x,), (x,))
                return result, forward
            return result, jax.vmap(lambda x: loss_fn(params, x)[0])(jnp.stack([x, -x]))

        def traced(loss_fn):
            fun = functools.partial(everything, loss_fn)
            # Otherwise XLA may leave out the rounding of some results, not of others.
            options = {"xla_allow_excess_precision": False}
            return jax.jit(fun, compiler_options=options).trace(PARAMS, X)

        both = [traced(f) for f in (ours, theirs)]
        assert_same_types(*(x.out_info for x in (both[0], traced(before))))
        counts = [products(x.jaxpr.jaxpr) for x in both]
        assert counts[0] == counts[1]
        results = [x.lower().compile()(PARAMS, X) for x in both]
        jax.tree.map(np.testing.assert_array_equal, *results)


def squares(params, x):
    """Matrix products and a convolution, to be differentiated twice."""
    y = jnp.tanh(convolved(plain)(jnp.tanh(x @ params["w"]), params["w"]))
    return jnp.mean((y @ params["w"]) ** 2)


CAST = ls.autocast(squares)


def squares_by_hand(params, x):
    y = jnp.tanh(by_hand(jnp.matmul)(x, params["w"]))
    y = jnp.tanh(convolved(by_hand)(y, params["w"]))
    return jnp.mean(by_hand(jnp.matmul)(y, params["w"]) ** 2)


def on_an_explicit_mesh(f):
    mesh = make_mesh(EXPLICIT, d=2)
    with set_mesh(mesh):
        args = jax.device_put((PARAMS, X), NamedSharding(mesh, P()))
        return jax.device_get(jax.jit(jax.value_and_grad(f))(*args))


def in_shard_map(f):
    def local(params, x):
        loss, grads = jax.value_and_grad(f)(vary(params, "d"), x)
        return jax.lax.pmean((loss, grads), "d")

    return on_mesh(local, (P(), P("d")), P(), make_mesh(d=2))(
        PARAMS, jnp.tile(X, (2, 1))
    )


def around_shard_map(f, cast=lambda f: f):
    def mean(params, x):
        mapped = jax.shard_map(
            lambda params, x: jax.lax.pmean(f(params, x), "d"),
            mesh=make_mesh(d=2),
            in_specs=(P(), P("d")),
            out_specs=P(),
        )
        return mapped(params, x)

    fun = jax.value_and_grad(cast(mean))
    return jax.jit(fun)(PARAMS, jnp.tile(X, (2, 1)))


TRANSFORMED = {
    "hessian": lambda f: jax.hessian(lambda s: f(PARAMS, s * X))(1.0),
    "gradient of a gradient": lambda f: jax.grad(
        lambda p: optax.tree.norm(jax.grad(f)(p, X), squared=True)
    )(PARAMS),
    "linearize": lambda f: jax.linearize(lambda x: f(PARAMS, x), X)[1](X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(
        PARAMS, jnp.stack([X, -X])
    ),
    "donation": lambda f: jax.jit(jax.grad(f), donate_argnums=0)(
        jax.tree.map(jnp.copy, PARAMS), X
    ),
    "scale_backward": lambda f: jax.grad(ls.scale_backward(f, 8.0))(PARAMS, X),
    "scale_block": lambda f: jax.grad(ls.scale_block(f))(PARAMS, X),
    "explicit mesh": on_an_explicit_mesh,
    "shard_map around it": in_shard_map,
}


# The slow ones differentiate or vectorize what others do, too.
@pytest.mark.parametrize(
    "name", slow_but(TRANSFORMED.keys() - {"hessian", "vmap of grad"}, TRANSFORMED)
)
def test_what_transforms_functions_takes_it_like_any_other(name):
    ours, theirs = (TRANSFORMED[name](f) for f in (CAST, squares_by_hand))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_it_may_be_around_a_shard_map():
    ours = around_shard_map(squares, ls.autocast)
    jax.tree.map(np.testing.assert_array_equal, ours, around_shard_map(squares_by_hand))


def test_a_step_is_traced_once_and_retries_take_it():
    tx = ls.with_loss_scaling(optax.adam(1e-3), ls.DynamicLossScale(2.0**24))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        loss, grads, state = ls.value_and_grad_with_retries(CAST, state)(params, X)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    assert ls.was_applied(state) and ls.get_loss_scale(state) < 2.0**24


def test_scopes_and_lines_stay_in_the_program():
    def scoped(w, x):
        with jax.named_scope("attention"):
            return jnp.sum(x @ w)

    text = jax.jit(ls.autocast(scoped)).lower(X, X).as_text(debug_info=True)
    assert "attention/dot_general" in text and "test_autocast.py" in text


def test_it_is_a_decorator_and_keeps_the_name():
    @ls.autocast
    def loss_fn(x):
        """Its docstring."""
        return jnp.sum(x @ x)

    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss_fn", "Its docstring.")
    assert products_of(loss_fn, X) == {"float16": 1}
    half = functools.partial(ls.autocast, dtype="bfloat16")(jax.jit(jnp.matmul))
    assert products_of(half, X, X) == {"bfloat16": 1}


@pytest.mark.parametrize(
    ("fun", "dtype", "error", "message"),
    [
        (1, F16, TypeError, "`fun` must be a function, got 1"),
        (jnp.sum, F32, ValueError, "`dtype` must be float16 or bfloat16, got float32"),
        (jnp.sum, jnp.float8_e4m3fn, ValueError, "float8 needs a scale for each"),
        (jnp.sum, jnp.int8, ValueError, "`dtype` must be a floating-point type"),
        (jnp.sum, None, ValueError, "`dtype` must be a floating-point type"),
    ],
)
def test_what_is_no_function_or_no_narrower_type_is_refused(fun, dtype, error, message):
    with pytest.raises(error, match=message):
        ls.autocast(fun, dtype)


def test_float16_parameters_multiply_float32_in_float16():
    half = jax.tree.map(lambda p: p.astype(F16), PARAMS)

    def loss_fn(params):
        return jnp.mean((X @ params["w"]) ** 2)

    assert products_of(jax.grad(loss_fn), half)["float32"]
    cast = ls.grad(ls.autocast(loss_fn), ls.DynamicLossScale().init())
    assert set(products_of(cast, half)) == {"float16"}
    chex.assert_trees_all_close(cast(half), cast(PARAMS), atol=1e-3)


def test_bfloat16_with_a_scale_of_1_trains():
    tx = ls.with_loss_scaling(optax.adam(1e-1), ls.FixedLossScale(1.0))
    fun = ls.autocast(squares, jnp.bfloat16)

    @jax.jit
    def step(carry, _):
        params, state = carry
        loss, grads = ls.value_and_grad(fun, state)(params, X)
        updates, state = tx.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), loss

    _, losses = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, length=30)
    assert losses[-1] < 0.2 * losses[0]


# Models of the frameworks: all products, forward and backward, are float16.


def flax_linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            for block in (nn.Dense, nn.remat(nn.Dense, policy=policy)):
                x = nn.LayerNorm()(nn.relu(block(N)(x)))
            x = nn.MultiHeadDotProductAttention(2)(x, x)
            return nn.Conv(3, (3,))(x)

    model = Model()
    params = model.init(jax.random.key(0), X)
    return params, lambda params: jnp.mean(model.apply(params, X) ** 2)


def haiku():
    def forward(x):
        x = hk.LayerNorm(-1, True, True)(hk.Linear(N)(x))
        return jnp.mean(hk.Conv1D(3, 3)(x[None]) ** 2)

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), X)
    return params, lambda params: model.apply(params, X)


def equinox():
    model = eqx.nn.MLP(N, 1, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params):
        return jnp.mean(jax.vmap(eqx.combine(params, static))(X) ** 2)

    return params, loss_fn


@pytest.mark.parametrize("make", slow_but([haiku], [flax_linen, haiku, equinox]))
def test_every_product_of_a_model_is_float16_forward_and_backward(make):
    params, loss_fn = make()
    state = ls.DynamicLossScale().init()
    plainly = products_of(jax.value_and_grad(loss_fn), params)
    cast = ls.value_and_grad(ls.autocast(loss_fn), state)
    assert products_of(cast, params) == {"float16": plainly["float32"]}
    (loss, grads), (expected, slopes) = (
        cast(params),
        jax.value_and_grad(loss_fn)(params),
    )
    assert abs(loss / expected - 1) < 0.01
    chex.assert_trees_all_close(grads, slopes, atol=0.02 * optax.tree.norm(slopes))


@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_a_module_of_nnx_keeps_its_statistics(make):
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(N, N, rngs=rngs)
            self.norm = nnx.BatchNorm(N, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    def loss_fn(model, x):
        return jnp.mean(jnp.tanh(model(x)) * x)

    means = []
    for fun in (loss_fn, ls.autocast(loss_fn)):
        model, state = Model(), ls.DynamicLossScale().init()
        make(fun, state, value_and_grad=nnx.value_and_grad)(model, X)
        means.append(model.norm.mean[...])
    assert jnp.any(means[0] != 0)
    np.testing.assert_allclose(*means, atol=1e-3)
    differ = means[0] != means[1]
    assert differ.any(), "the product was float16"


def test_a_state_of_equinox_may_be_used_up():
    """Once it is set, the old one cannot be read."""
    linear = eqx.nn.Linear(N, N, key=jax.random.key(0))
    model = eqx.nn.SpectralNorm(linear, "weight", key=jax.random.key(1))

    def loss_fn(model, state):
        y, state = model(X[0], state)
        return jnp.sum(y), state

    (loss, _), _ = eqx.filter_value_and_grad(ls.autocast(loss_fn), has_aux=True)(
        model, eqx.nn.State(model)
    )
    assert abs(loss - loss_fn(model, eqx.nn.State(model))[0]) < 0.01


# What is wrong in float16, and right where only products are.


def attention(x, cast):
    with np.errstate(over="ignore"):
        scores = jnp.where(jnp.zeros((N, N), bool), x @ x.T, cast(-1e9))
    return jnp.sum(jax.nn.softmax(scores) @ x)


def small_norm(x, cast):
    x = cast(1e-5) * (x @ x)
    return jnp.sum(x / jnp.sqrt(jnp.sum(x**2, 1, keepdims=True) + cast(1e-8)))


def log_of_tanh(x, cast):
    return jnp.sum(jnp.log(1 - jnp.tanh(4 * (x @ x)) ** 2 + cast(1e-6)))


def counted(x, cast):
    return jnp.sum(x @ x) / jnp.sum(jnp.ones(70_000, x.dtype))


def lookup(x, cast):
    table = x @ x
    return jnp.sum(table[jnp.zeros(30_000, int)] * cast(1 / 3))


@pytest.mark.parametrize(
    "loss_fn", [attention, small_norm, log_of_tanh, counted, lookup]
)
def test_what_a_cast_in_the_wrong_place_ruins_is_right(loss_fn):
    x = jnp.abs(X)
    expected = jax.value_and_grad(lambda x: loss_fn(x, F32))(x)
    ours = jax.value_and_grad(ls.autocast(lambda x: loss_fn(x, F32)))(x)
    chex.assert_trees_all_close(ours, expected, rtol=0.02, atol=1e-4)
    value, slope = jax.value_and_grad(lambda x: loss_fn(x, F16).astype(F32))(
        x.astype(F16)
    )
    wrong = abs(value / expected[0] - 1) > 0.02
    wrong |= optax.tree.norm(slope - expected[1]) > 0.02 * optax.tree.norm(expected[1])
    assert wrong or not ls.all_finite((value, slope))


def test_a_program_that_changes_what_it_is_given_is_refused():
    def loss_fn(x, seen):
        seen[0] = x
        return jnp.sum(x @ x)

    with pytest.raises(ValueError, match="must not change its arguments"):
        ls.autocast(loss_fn)(X, [X])
