"""value_and_grad and grad are JAX's, at a scale; scale_loss and unscale_grads, too."""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from shared import enable_x64

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**12).init()
PARAMS = {"w": np.float32([0, 1, 2]), "b": np.ones(2, np.float32)}
X = np.float32([0.5, -1.0, 2.0])


def loss_fn(params, x, power=2):
    return jnp.sum(params["w"] * x) ** power + jnp.sum(params["b"])


def with_aux(params, x):
    return [jnp.vdot(params["w"], x), {"x": x, "step": 3}]


def product(a, b, c):
    return a * b * c


# A loss, the options of jax.value_and_grad, arguments.
CASES = {
    "a tree": (loss_fn, {}, (PARAMS, X, 3)),
    "a bfloat16 loss": (lambda w: jnp.sum(w**2).astype(jnp.bfloat16), {}, (X,)),
    "has_aux": (with_aux, {"has_aux": True}, (PARAMS, X)),
    "holomorphic": (lambda z: z**3, {"holomorphic": True}, (1 + 2j,)),
    "allow_int": (lambda a: a[0] ** 2 * a[1], {"allow_int": True}, ((3.0, 2),)),
    **{
        f"argnums {argnums!r}": (product, {"argnums": argnums}, (2.0, 3.0, 4.0))
        for argnums in (1, [1, 0], (0, -1), np.array([0, 2]), np.int64(2), np.array(2))
    },
}


@pytest.mark.parametrize(("fun", "options", "args"), CASES.values(), ids=CASES)
def test_values_and_gradients_equal_jaxs_bit_for_bit(fun, options, args):
    def results(*args):
        *retried, _ = ls.value_and_grad_with_retries(fun, STATE, **options)(*args)
        ours = ls.value_and_grad(fun, STATE, **options)(*args)
        alone = ls.grad(fun, STATE, **options)(*args)
        argnums = np.asarray(options.get("argnums", 0)).tolist()
        jaxs = jax.value_and_grad(fun, **{**options, "argnums": argnums})
        return ours, tuple(retried), alone, jaxs(*args)

    # Eager, the Python number in the auxiliary output stays one.
    run = results if "has_aux" in options else jax.jit(results)
    ours, retried, alone, expected = run(*args)
    value, grads = expected
    assert_same_bits(ours, expected)
    assert_same_bits(retried, expected)
    assert_same_bits(alone, (grads, value[1]) if "has_aux" in options else grads)


def test_compiled_gradients_take_keywords():
    ours, theirs = ls.value_and_grad(loss_fn, STATE), jax.value_and_grad(loss_fn)
    assert_same_bits(*(jax.jit(f)(PARAMS, x=X, power=3) for f in (ours, theirs)))


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
    seen, new_ref = [], getattr(jax, "new_ref", None) or jax.experimental.mutable_array
    calls = new_ref(jnp.float32(0))

    def fun(w, x):
        if x[0] > 0:
            seen.append(float(x[0]))
        jax.experimental.io_callback(seen.append, None, 7.0)
        calls[...] += 1.0
        seen.append(w * x)  # a tracer, as those that a model stores
        return jnp.sum(seen.pop() ** 2)

    grads = ls.grad(fun, STATE)(X, X)
    jax.effects_barrier()
    np.testing.assert_array_equal(grads, 2 * X**3)
    assert seen == [0.5, 7.0] and float(calls[...]) == 1


unscale_grads = jax.jit(ls.unscale_grads)


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**15])
def test_gradients_are_divided_wide_and_rounded_once(scale):
    every = np.arange(2**16, dtype="uint16").view(jnp.bfloat16)
    state = ls.FixedLossScale(scale).init()
    with enable_x64(True), np.errstate(invalid="ignore"):
        for wide, narrow in (("float32", "bfloat16"), ("float64", "float64")):
            exact = every.astype(wide) * (1 / np.asarray(scale, wide))
            normal = ~(np.abs(exact) < 2.0**-125)  # XLA flushes smaller ones to zero
            grads = np.asarray(unscale_grads(every.astype(jnp.dtype(narrow)), state))
            expected = np.float64(exact.astype(grads.dtype)[normal])
            np.testing.assert_array_equal(np.float64(grads[normal]), expected)


def test_leaves_that_are_no_numbers_pass_through_unscale():
    grads = {"i": jnp.int32(4), "f0": np.zeros(2, jax.dtypes.float0), "none": None}
    assert_same_bits(ls.unscale_grads(grads, STATE), grads)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_scale_loss_is_exact_and_in_float32_or_wider(dtype):
    with enable_x64(True):
        losses = [np.array(1.5, dtype), {"value": np.array([3.0], dtype), "no": None}]
        wide = "float64" if dtype == "float64" else "float32"
        expected = jax.tree.map(lambda x: 2**12 * x.astype(wide), losses)
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

    for result in jax.eval_shape(lambda: [*results()]):
        assert result.dtype == jnp.float32
    state = ls.DynamicLossScale().init()
    ls.check_loss_scale(state, grads=x, value=np.float64(1.0))
    assert float(ls.gradient_report(x).size) == 2 and ls.all_finite(x)
