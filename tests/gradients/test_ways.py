"""Every way to compute gradients gives those of plain JAX."""

import functools

import flax.linen as nn
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from jax.sharding import PartitionSpec
from meshes import on_mesh
from shared import enable_x64, new_ref, slow_but
from training import normal

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**10).init()
X, P, V = (normal(4, seed=i) for i in range(3))


def by_hand(fun):
    scaled = jax.grad(lambda *args, **named: ls.scale_loss(fun(*args, **named), STATE))
    return lambda *args, **named: ls.unscale_grads(scaled(*args, **named), STATE)


def by_retries(fun):
    fun = ls.value_and_grad_with_retries(fun, STATE)
    return lambda *args, **named: fun(*args, **named)[1]


SCALED = {  # Ways that multiply the loss.
    "value_and_grad": lambda f: lambda *a, **k: ls.value_and_grad(f, STATE)(*a, **k)[1],
    "grad": lambda f: ls.grad(f, STATE),
    "by hand": by_hand,
    "retries": by_retries,
}
WAYS = SCALED | {
    "scale_backward": lambda f: jax.grad(ls.scale_backward(f, STATE)),
    "scale_block": lambda f: jax.grad(ls.scale_block(f)),
}
AROUND = WAYS | {
    "checkpoint around it": lambda f: jax.grad(jax.checkpoint(ls.scale_backward(f, 8))),
    "checkpoint inside it": lambda f: jax.grad(ls.scale_backward(jax.checkpoint(f), 8)),
}


def loss_fn(p, lam, x, dtype="float32"):
    """No derivative of it up to the third vanishes."""
    p, x = p.astype(dtype), x.astype(dtype)
    fit = jnp.sum(jnp.square(jnp.sin(p * x) - jnp.asarray(1.0, dtype)))
    return fit.astype(jnp.float32) + lam * jnp.sum(jnp.exp(p).astype(jnp.float32))


def unrolled(gradient, lam):
    """The loss after three steps, by how much they decay."""

    def step(p, _):
        return p - 0.1 * gradient(p, lam, X), None

    return loss_fn(jax.lax.scan(step, P, length=3)[0], 0.0, X)


# Derivatives of a way to compute gradients, and of the gradients.
DERIVATIVES = {
    "gradient": lambda way, f: way(f)(P, 1.0, X),
    "by number": lambda way, f: jax.grad(lambda lam: way(f)(P, lam, X) @ V)(1.0),
    "by closed-over number": lambda way, f: jax.grad(
        lambda lam: way(lambda p: f(p, lam, X))(P) @ V
    )(1.0),
    "by array": lambda way, f: jax.grad(lambda x: way(f)(P, 1.0, x) @ V)(X),
    "jacrev": lambda way, f: jax.jacrev(way(f))(P, 1.0, X),
    "jacfwd": lambda way, f: jax.jacfwd(way(f))(P, 1.0, X),
    "jvp": lambda way, f: jax.jvp(lambda p, lam: way(f)(p, lam, X), (P, 1.0), (V, 0.5))[
        1
    ],
    "unrolled": lambda way, f: jax.grad(functools.partial(unrolled, way(f)))(0.3),
}


@functools.cache
def derivatives(way, dtype, jit=jax.jit):
    """All of one way, in one program."""
    loss = functools.partial(loss_fn, dtype=dtype)
    return jit(lambda: {name: f(way, loss) for name, f in DERIVATIVES.items()})()


TWICE = [x for x in AROUND if x != "retries"]  # whose loop has no second derivatives
RUNS = {"jit": jax.jit, "eager": lambda f: f}
CASES = [("float32", "jit"), ("float16", "jit"), ("float32", "eager")]


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("case", slow_but(CASES[:1], CASES), ids=", ".join)
@pytest.mark.parametrize("way", TWICE)
def test_derivative_is_that_of_jax(way, case, name):
    dtype, run = case
    ours = derivatives(AROUND[way], dtype, RUNS[run])[name]
    rtol, atol = (2e-5, 1e-6) if dtype == "float32" else (0.02, 0.02)
    theirs = derivatives(jax.grad, dtype)[name]
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("way", AROUND.values(), ids=AROUND)
def test_no_tracer_outlives_its_trace(way):
    with jax.check_tracer_leaks():
        jax.make_jaxpr(lambda p: way(lambda p: loss_fn(p, 1.0, X))(p))(P)


@pytest.mark.parametrize("name", ["scale", "state", "fun", "args", "loss", "tree"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_loss_may_have_keywords_of_any_name(way, name):
    gradient = way(lambda w, **named: named[name] * w)
    assert gradient(2.0, **{name: 3.0}) == 3


@pytest.mark.parametrize("way", SCALED)
def test_float16_loss_warns(way):
    with pytest.warns(UserWarning, match="The loss is float16"):
        jax.eval_shape(SCALED[way](jnp.float16), 2.0)


def square_sum(params, x, power=2):
    return jnp.sum(params["w"] * x) ** power + jnp.sum(params["b"])


def with_aux(w, x):
    return [w @ x, {"x": x, "step": 3}]


def product(a, b, c):
    return a * b * c


PARAMS = {"w": np.float32([0, 1, 2, 3]), "b": np.ones(2, np.float32)}
# A loss, the options of jax.value_and_grad, arguments.
CALLS = {
    "a tree": (square_sum, {}, (PARAMS, X, 3)),
    "a bfloat16 loss": (lambda w: jnp.sum(w**2).astype(jnp.bfloat16), {}, (X,)),
    "has_aux": (with_aux, {"has_aux": True}, (X, P)),
    "holomorphic": (lambda z: z**3, {"holomorphic": True}, (1 + 2j,)),
    "allow_int": (lambda a: a[0] ** 2 * a[1], {"allow_int": True}, ((3.0, 2),)),
    **{
        f"argnums {argnums!r}": (product, {"argnums": argnums}, (2.0, 3.0, 4.0))
        for argnums in (1, [1, 0], (0, -1), np.array([0, 2]), np.int64(2), np.array(2))
    },
}


@pytest.mark.parametrize(("fun", "options", "args"), CALLS.values(), ids=CALLS)
def test_values_and_gradients_equal_jaxs_bit_for_bit(fun, options, args):
    argnums = np.asarray(options.get("argnums", 0)).tolist()

    def results(*args):
        *retried, _ = ls.value_and_grad_with_retries(fun, STATE, **options)(*args)
        ours = ls.value_and_grad(fun, STATE, **options)(*args)
        jaxs = jax.value_and_grad(fun, **options | {"argnums": argnums})(*args)
        return jaxs, ours, tuple(retried), ls.grad(fun, STATE, **options)(*args)

    # Eager, the Python number in the auxiliary output stays one.
    has_aux = "has_aux" in options
    expected, ours, retried, alone = (results if has_aux else jax.jit(results))(*args)
    assert_same_bits(ours, expected)
    assert_same_bits(retried, expected)
    value, grads = expected
    assert_same_bits(alone, (grads, value[1]) if has_aux else grads)


def test_value_is_never_multiplied():
    state = ls.FixedLossScale(2.0**100).init()
    value, grads = jax.jit(ls.value_and_grad(lambda w: w * 1e30, state))(1.0)
    assert float(value) == np.float32(1e30)
    assert not np.isfinite(grads), "the gradients did overflow"


def test_scale_is_a_constant_to_derivatives():
    def through(scale):
        state = STATE._replace(loss_scale=scale)
        scaled = ls.scale_loss(jnp.float32(2.0), state)
        value, grads = ls.value_and_grad(lambda z: z**3, state)(2.0)
        return scaled + value + grads + ls.unscale_grads(scaled, state)

    assert float(jax.jit(jax.grad(through))(8.0)) == 0.0


def test_function_is_called_as_jax_does():
    """What a traced program would refuse: branches, prints and stores on the host."""
    seen, calls = [], new_ref(jnp.float32(0))

    def fun(w, x):
        if x[0] < 9:
            jax.experimental.io_callback(seen.append, None, 7.0)
        calls[...] += 1.0
        seen.append(w * x)  # a tracer, as those that a model stores
        return jnp.sum(seen.pop() ** 2)

    grads = ls.grad(fun, STATE)(P, X)
    jax.effects_barrier()
    assert seen == [7.0] and float(calls[...]) == 1
    np.testing.assert_allclose(grads, 2 * P * X**2, rtol=1e-6)


unscale = jax.jit(ls.unscale_grads)


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**15])
def test_gradients_are_divided_wide_and_rounded_once(scale):
    every = np.arange(2**16, dtype="uint16").view(jnp.bfloat16)
    state = ls.FixedLossScale(scale).init()
    with enable_x64(True), np.errstate(invalid="ignore"):
        for wide, narrow in (("float32", "bfloat16"), ("float64", "float64")):
            exact = every.astype(wide) * (1 / np.asarray(scale, wide))
            normal = ~(np.abs(exact) < 2.0**-125)  # XLA flushes smaller ones to zero
            grads = np.asarray(unscale(every.astype(jnp.dtype(narrow)), state))
            expected = np.float64(exact.astype(grads.dtype)[normal])
            np.testing.assert_array_equal(np.float64(grads[normal]), expected)


def test_unscale_grads_passes_non_numbers_through():
    grads = {"i": jnp.int32(4), "f0": np.zeros(2, jax.dtypes.float0), "none": None}
    grads["inf"] = np.complex64([complex(np.inf, 0), complex(np.nan, -np.inf)])
    assert_same_bits(ls.unscale_grads(grads, STATE), grads)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_scale_loss_is_exact_and_in_float32_or_wider(dtype):
    with enable_x64(True):
        losses = [np.array(1.5, dtype), {"value": np.array([3.0], dtype), "no": None}]
        wide = "float64" if dtype == "float64" else "float32"
        expected = jax.tree.map(lambda x: 2**10 * x.astype(wide), losses)
        assert_same_bits(jax.jit(ls.scale_loss)(losses, STATE), expected)


def test_float64_of_numpy_is_float32_without_a_warning():
    """Warnings are errors."""
    x, tx = np.ones(2), ls.with_loss_scaling(optax.adam(1e-3))

    def results():
        yield ls.scale_loss(np.float64(3.0), STATE)
        yield ls.unscale_grads(x, STATE)
        yield ls.max_magnitude(x)
        yield tx.update(x, tx.init(np.float32(x)), value=np.float64(1.0))[0]
        yield jax.grad(ls.scale_backward(jnp.sum, np.float64(3.0)))(x)

    assert all(x.dtype == jnp.float32 for x in jax.eval_shape(lambda: [*results()]))
    ls.check_loss_scale(STATE, grads=x, value=np.float64(1.0))
    assert float(ls.gradient_report(x).size) == 2 and ls.all_finite(x)


TYPES = dict.fromkeys(["float16", "float8_e5m2", "float8_e4m3fn"], "float32")
TYPES |= {x: x for x in ("bfloat16", "float32", "float64", "complex64", "complex128")}


@pytest.mark.parametrize(("dtype", "expected"), TYPES.items())
def test_gradients_have_the_type_of_the_parameter_or_float32(dtype, expected):
    def loss_fn(w):
        return jnp.sum(jnp.abs(w.astype(expected))) * 2.0**-11

    with enable_x64(True):
        w, slopes = np.array([2.0, -0.5]), np.array([2.0**-11, -(2.0**-11)])
        all_grads = jax.jit(lambda w: [way(loss_fn)(w) for way in SCALED.values()])
        for grads in all_grads(w.astype(jnp.dtype(dtype))):
            assert_same_bits(grads, slopes.astype(jnp.dtype(expected)))


OVERWRITTEN = "_overwrite_with_gradient"
FLOAT8 = {"params": np.ones(3, np.float32), OVERWRITTEN: {"h": np.float32([1, 2])}}


@jax.custom_vjp
def observed(x, history):
    return x


# The new value of the history, as of a type that is its own.
observed.defvjp(
    lambda x, history: (x, x), lambda x, g: (g, jnp.stack([g[0] * x[0], 7 + 0 * x[0]]))
)
OVERWRITES = WAYS | {
    "scale_block by keyword": lambda f: jax.grad(
        lambda p, x: ls.scale_block(f)(p=p, factor=x)
    )
}


@pytest.mark.parametrize("run", slow_but(["jit"], RUNS))
@pytest.mark.parametrize("way", OVERWRITES)
def test_overwrites_are_not_divided_and_never_nonfinite(way, run):
    """As Flax's float8 layers do, they put a value into the place of a gradient."""

    def loss_fn(p, factor):
        return jnp.sum(observed(factor * p["params"], p[OVERWRITTEN]["h"]))

    scale = 512.0 if "block" in way else 1024.0  # a block chooses for a loss
    # By hand, nothing of this package calls the loss, and can keep the old value.
    kept = [np.nan, np.nan] if way == "by hand" else [1.0, 2.0]
    for factor, expected in ((1.0, [scale, 7.0]), (np.nan, kept)):
        grads = RUNS[run](OVERWRITES[way](loss_fn))(FLOAT8, factor)
        np.testing.assert_array_equal(grads[OVERWRITTEN]["h"], expected)
        np.testing.assert_array_equal(grads["params"], factor * np.ones(3))


def test_float8_histories_of_flax_are_neither_divided_nor_nonfinite():
    def loss_fn(params, factor):
        return factor * jnp.sum(net.apply(params, X[None]))

    net = nn.Dense(8, dot_general_cls=Fp8DirectDotGeneralOp)
    params = jax.jit(net.init)(jax.random.key(0), X[None])
    for factor, largest in ((1.0, 1024.0), (np.inf, 0.0)):
        grads = jax.jit(ls.grad(loss_fn, STATE))(params, factor)
        [histories] = grads[OVERWRITTEN].values()
        assert histories["output_grad_amax_history"][0] == largest
        assert histories["input_amax_history"][0] == np.abs(X).max()


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_averaged_over_devices_as_documented(check_vma):
    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    def averaged(w, x):
        return jax.lax.pmean(loss_fn(w, x), "d")

    def gradient(w, x):
        if check_vma:
            return ls.grad(averaged, STATE)(w, x)
        return jax.lax.pmean(ls.grad(loss_fn, STATE)(w, x), "d")

    replicated, rows = PartitionSpec(), PartitionSpec("d")
    w, x = jnp.ones(2), jnp.arange(16.0).reshape(8, 2)
    options = {"in_specs": (replicated, rows), "check_vma": check_vma}
    found = on_mesh(gradient, out_specs=replicated, **options)(w, x)
    np.testing.assert_allclose(found, jax.grad(loss_fn)(w, x), rtol=1e-6)
