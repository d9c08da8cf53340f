"""Every way to compute gradients gives those of plain JAX."""

import functools

import chex
import flax.linen as nn
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax import nnx
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from shared import enable_x64, new_ref, slow_but
from training import normal

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**10).init()
KEY = jax.random.wrap_key_data(np.zeros(2, "uint32"))
TX = ls.with_loss_scaling(optax.sgd(0.1))
X, P = normal(4), normal(4, seed=1)


def by_grad(fun, state=STATE):
    return ls.grad(fun, state)


def by_hand(fun, state=STATE):
    scaled = jax.grad(lambda *args, **named: ls.scale_loss(fun(*args, **named), state))
    return lambda *args, **named: ls.unscale_grads(scaled(*args, **named), state)


def by_retries(fun, state=STATE):
    fun = ls.value_and_grad_with_retries(fun, state)
    return lambda *args, **named: fun(*args, **named)[1]


def by_backward(fun, state=STATE):
    return jax.grad(ls.scale_backward(fun, state))


def by_block(fun):
    return jax.grad(ls.scale_block(fun))


def by_checkpoint_around(fun):
    return jax.grad(jax.checkpoint(ls.scale_backward(fun, 8)))


def by_checkpoint_inside(fun):
    return jax.grad(ls.scale_backward(jax.checkpoint(fun), 8))


SCALED = [by_grad, by_hand, by_retries]  # They multiply the loss.
WAYS = [*SCALED, by_backward, by_block]
CHECKPOINTED = [by_checkpoint_around, by_checkpoint_inside]


def loss_fn(p, lam, x, dtype="float32"):
    """No derivative of it up to the third vanishes."""
    p, x = p.astype(dtype), x.astype(dtype)
    fit = jnp.sum(jnp.square(jnp.sin(p * x) - jnp.asarray(1.0, dtype)))
    return fit.astype(jnp.float32) + lam * jnp.sum(jnp.exp(p).astype(jnp.float32))


def trained(gradient, decay):
    """The loss after three steps."""

    def step(p, _):
        return p - 0.1 * gradient(p, decay, X), None

    return loss_fn(jax.lax.scan(step, P, length=3)[0], 0.0, X)


def derivatives(way, dtype):
    """The gradient that a way computes, and derivatives of it."""
    fun = functools.partial(loss_fn, dtype=dtype)
    gradient = way(fun)
    return {
        "gradient": gradient(P, 1.0, X),
        "jacobian in reverse": jax.jacrev(gradient, argnums=(0, 1, 2))(P, 1.0, X),
        "jacobian forward": jax.jacfwd(gradient, argnums=(0, 1, 2))(P, 1.0, X),
        "by a closed-over number": jax.grad(
            lambda lam: jnp.sum(way(lambda p: fun(p, lam, X))(P))
        )(1.0),
        "through training": jax.grad(functools.partial(trained, gradient))(0.3),
    }


@functools.cache
def derivatives_of_jax(dtype):
    return jax.jit(lambda: derivatives(jax.grad, dtype))()


def eager(fun):
    return fun


# The loop of retries has no second derivatives.
DIFFERENTIABLE_TWICE = [by_grad, by_hand, by_backward, by_block, *CHECKPOINTED]


@pytest.mark.parametrize("run", slow_but([jax.jit], [jax.jit, eager]))
@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float32", "float16"]))
@pytest.mark.parametrize("way", DIFFERENTIABLE_TWICE)
def test_gradient_and_its_derivatives_are_those_of_jax(way, dtype, run):
    ours = run(lambda: derivatives(way, dtype))()
    rtol, atol = (2e-5, 1e-6) if dtype == "float32" else (0.02, 0.02)
    chex.assert_trees_all_close(ours, derivatives_of_jax(dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("way", [*WAYS, *CHECKPOINTED])
def test_no_tracer_outlives_its_trace(way):
    with jax.check_tracer_leaks():
        jax.make_jaxpr(lambda p: way(lambda p: loss_fn(p, 1.0, X))(p))(P)


@pytest.mark.parametrize("way", WAYS)
def test_loss_may_have_keywords_of_any_name(way):
    def loss_fn(w, **named):
        assert set(named) == set(names)
        return 3.0 * w

    names = ["scale", "state", "fun", "args", "kwargs", "loss", "tree"]
    assert jax.jit(lambda: way(loss_fn)(2.0, **dict.fromkeys(names, 1.0)))() == 3


def square_sum(params, x, power=2):
    return jnp.sum(params["w"] * x) ** power + jnp.sum(params["b"])


def with_aux(w, x):
    return [w @ x, {"x": x, "key": KEY, "function": jnp.sin, "name": "text", "step": 3}]


class Weight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(4))


def split_loss(variables):
    return jnp.sum(nnx.merge(MODULE, variables).w[...] ** 2)


PARAMS = {"w": np.float32([0, 1, 2, 3]), "b": np.ones(2, np.float32)}
MODULE, VARIABLES = nnx.split(Weight())
# A loss, the options of jax.value_and_grad, arguments.
CALLS = {
    "a tree": (square_sum, {}, (PARAMS, X, 3)),
    "a bfloat16 loss": (lambda w: jnp.sum(w**2).astype(jnp.bfloat16), {}, (X,)),
    "a split NNX module": (split_loss, {}, (VARIABLES,)),
    "has_aux": (with_aux, {"has_aux": True}, (X, P)),
    "holomorphic": (lambda z: z**3, {"holomorphic": True}, (1 + 2j,)),
    "allow_int": (lambda a: a[0] ** 2 * a[1], {"allow_int": True}, ((3.0, 2),)),
}


@pytest.mark.parametrize(("fun", "options", "args"), CALLS.values(), ids=CALLS)
def test_values_and_gradients_equal_those_of_jax_bit_for_bit(fun, options, args):
    def results(*args):
        *retried, _ = ls.value_and_grad_with_retries(fun, STATE, **options)(*args)
        ours = ls.value_and_grad(fun, STATE, **options)(*args)
        jaxs = jax.value_and_grad(fun, **options)(*args)
        return jaxs, ours, tuple(retried), ls.grad(fun, STATE, **options)(*args)

    # Eager, the Python number in the auxiliary output stays one.
    has_aux = "has_aux" in options
    expected, ours, retried, alone = (results if has_aux else jax.jit(results))(*args)
    assert_same_bits(ours, expected)
    assert_same_bits(retried, expected)
    value, grads = expected
    assert_same_bits(alone, (grads, value[1]) if has_aux else grads)


ARGNUMS = [1, [1, 0], (0, -1), np.array([0, 2]), np.int64(2), np.array(2)]


@pytest.mark.parametrize("argnums", ARGNUMS, ids=repr)
def test_argnums_may_be_a_list_or_of_numpy(argnums):
    def product(a, b, c):
        return a * b * c

    ours = ls.value_and_grad(product, STATE, argnums=argnums)
    jaxs = jax.value_and_grad(product, argnums=np.asarray(argnums).tolist())
    assert_same_bits(*jax.jit(lambda *args: (ours(*args), jaxs(*args)))(2.0, 3.0, 4.0))


def test_value_is_never_multiplied():
    state = ls.FixedLossScale(2.0**100).init()
    value, grads = jax.jit(ls.value_and_grad(lambda w: w * 1e30, state))(1.0)
    assert float(value) == np.float32(1e30)
    assert not np.isfinite(grads), "they should overflow"


def test_scale_is_a_constant_to_derivatives():
    def through(scale):
        state = STATE._replace(loss_scale=scale)
        scaled, unscaled = ls.scale_loss(2.0, state), ls.unscale_grads(2.0, state)
        return scaled, unscaled, ls.value_and_grad(lambda z: z**3, state)(2.0)

    assert not any(jax.tree.leaves(jax.jit(jax.jacrev(through))(8.0)))


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


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float64])
def test_gradients_are_divided_wide_and_rounded_once(dtype):
    numbers = np.arange(2**16, dtype="uint16")  # the bits of all in a narrow type
    wide = np.float64 if dtype == np.float64 else np.float32
    grads = numbers.astype(dtype) if wide == dtype else numbers.view(dtype)
    unscale = jax.jit(ls.unscale_grads)
    for scale in (1.0, 3.0, 2.0**15):
        with enable_x64(True), np.errstate(invalid="ignore"):
            found = np.asarray(unscale(grads, ls.FixedLossScale(scale).init()))
            exact = grads.astype(wide) * (1 / wide(scale))
            kept = ~(np.abs(exact) < 2.0**-125)  # XLA flushes smaller ones to zero
            expected = np.float64(exact.astype(found.dtype)[kept])
            np.testing.assert_array_equal(np.float64(found[kept]), expected)


def test_unscale_grads_leaves_integers_float0_none_and_inf_unchanged():
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
    x, number = np.ones(2), np.float64(3.0)

    def results():
        return [
            ls.scale_loss(number, STATE),
            ls.unscale_grads(x, STATE),
            ls.max_magnitude(x),
            TX.update(x, TX.init(np.float32(x)), value=number)[0],
            jax.grad(ls.scale_backward(jnp.sum, number))(x),
        ]

    assert {x.dtype for x in jax.eval_shape(results)} == {np.dtype("float32")}
    ls.check_loss_scale(STATE, grads=x, value=number)
    assert float(ls.gradient_report(x).size) == 2 and ls.all_finite(x)


NARROW = dict.fromkeys(["float16", "float8_e5m2", "float8_e4m3fn"], "float32")
OTHER = {x: x for x in ("bfloat16", "float32", "float64", "complex64", "complex128")}


@pytest.mark.parametrize(("dtype", "expected"), (NARROW | OTHER).items())
def test_gradients_have_the_type_of_the_parameter_or_float32(dtype, expected):
    def loss_fn(w):
        return jnp.sum(jnp.abs(w.astype(expected)))

    with enable_x64(True):
        w = jax.ShapeDtypeStruct((2,), dtype)
        for way in SCALED:
            assert jax.eval_shape(way(loss_fn), w).dtype == jnp.dtype(expected)


def by_block_by_keyword(fun):
    return jax.grad(lambda p, x: ls.scale_block(fun)(p=p, factor=x))


# A way, and the scale of a loss of 1.
HISTORIES = {
    by_grad: 1024.0,
    by_retries: 1024.0,
    by_backward: 1024.0,
    by_hand: 1024.0,
    by_block: 512.0,
    by_block_by_keyword: 512.0,
}
of_histories = pytest.mark.parametrize("way", HISTORIES)
compiled_or_not = pytest.mark.parametrize("run", slow_but([jax.jit], [jax.jit, eager]))


@functools.cache
def float8_histories(way, run):
    """Those of a good step, and of one that overflows.

    Flax puts their new values into the place of their gradients.
    """

    def loss_fn(p, factor):
        return factor * jnp.sum(net.apply(p, X[None]))

    net = nn.Dense(8, dot_general_cls=Fp8DirectDotGeneralOp)
    shapes = jax.eval_shape(net.init, KEY, X[None])
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    gradient = run(way(loss_fn))
    grads = (gradient(params, factor) for factor in (1.0, np.inf))
    [good], [bad] = (x["_overwrite_with_gradient"].values() for x in grads)
    return good, bad


@of_histories
@compiled_or_not
def test_float8_histories_are_not_divided(way, run):
    for histories in float8_histories(way, run):
        assert histories["input_amax_history"][0] == np.abs(X).max()
    good, _ = float8_histories(way, run)
    assert good["output_grad_amax_history"][0] == HISTORIES[way]


@of_histories
@compiled_or_not
def test_float8_histories_stay_finite_unless_the_loss_is_scaled_by_hand(way, run):
    """Then only jax calls the loss."""
    _, bad = float8_histories(way, run)
    last = np.inf if way is by_hand else 1.0
    assert bad["output_grad_amax_history"][0] == last


def half(w):
    return w.astype(jnp.float16).astype(jnp.float32)


@pytest.mark.parametrize("way", [*SCALED, by_backward])
def test_function_made_once_reads_the_nnx_optimizer_at_each_call(way):
    optimizer = nnx.Optimizer(Weight(), TX, wrt=nnx.Param)
    gradient = way(half, optimizer)
    for scale, finite in ((2.0**30, False), (2.0**10, True)):
        optimizer.opt_state.scale_state.loss_scale[...] = np.float32(scale)
        assert np.isfinite(gradient(np.float32(1))) == finite


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_scale_is_read_from_nnx_variables_of_the_new_kinds(kind):
    if not hasattr(nnx, "var_defaults"):
        pytest.skip("this Flax has no such variables")
    with nnx.var_defaults(**{kind: True}):
        optimizer = nnx.Optimizer(Weight(), TX, wrt=nnx.Param)
    assert bool(ls.was_applied(optimizer))
    gradient = ls.grad(lambda w: 2.0**-26 * half(w), optimizer)(np.float32(1))
    assert float(gradient) == 2.0**-26  # 0 in float16
    assert float(jax.jit(ls.get_loss_scale)(optimizer)) == 2.0**15
