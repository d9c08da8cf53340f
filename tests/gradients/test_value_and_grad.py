"""value_and_grad and grad, and what goes for all that scales a loss."""

import warnings

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**12).init()
RULE = ls.DynamicLossScale()
PARAMS = {"w": jnp.arange(3.0), "b": jnp.ones(2)}
X = jnp.array([0.5, -1.0, 2.0])
BATCH = jnp.ones((2, 3))
DIFFERENTIATE = (ls.value_and_grad, ls.grad, ls.value_and_grad_with_retries)


def loss_fn(params, x, power=2):
    return jnp.sum(params["w"] * x) ** power + jnp.sum(params["b"])


def with_aux(params, x):
    return [loss_fn(params, x), {"x": x, "step": 3}]


def square(w):
    return jnp.sum(w**2)


def cube(z):
    return z**3


# A loss, the options of jax.value_and_grad, arguments.
CASES = {
    "a tree": (loss_fn, {}, (PARAMS, X, 3)),
    "a bfloat16 loss": (lambda w: square(w).astype(jnp.bfloat16), {}, (X,)),
    "has_aux": (with_aux, {"has_aux": True}, (PARAMS, X)),
    "holomorphic": (cube, {"holomorphic": True}, (1 + 2j,)),
    "allow_int": (lambda a: a[0] ** 2 * a[1], {"allow_int": True}, ((3.0, 2),)),
    **{
        f"argnums {argnums}": (loss_fn, {"argnums": argnums}, (PARAMS, X))
        for argnums in (1, [1, 0])
    },
}


@pytest.mark.parametrize(("fun", "options", "args"), CASES.values(), ids=CASES)
def test_value_and_gradients_equal_jaxs_bit_for_bit(fun, options, args):
    value, grads = expected = jax.value_and_grad(fun, **options)(*args)
    assert_same_bits(ls.value_and_grad(fun, STATE, **options)(*args), expected)
    *retried, _ = ls.value_and_grad_with_retries(fun, STATE, **options)(*args)
    assert_same_bits(tuple(retried), expected)
    gradients_alone = (grads, value[1]) if "has_aux" in options else grads
    assert_same_bits(ls.grad(fun, STATE, **options)(*args), gradients_alone)


def test_compiled_value_and_gradients_take_keywords_and_equal_jaxs():
    ours, theirs = ls.value_and_grad(loss_fn, STATE), jax.value_and_grad(loss_fn)
    assert_same_bits(*(jax.jit(f)(PARAMS, x=X, power=3) for f in (ours, theirs)))


def test_the_value_is_never_multiplied():
    state = ls.FixedLossScale(2.0**100).init()
    value, grads = jax.jit(ls.value_and_grad(lambda w: w * 1e30, state))(1.0)
    assert value == np.float32(1e30)
    assert not np.isfinite(grads), "the gradients did overflow"


def test_the_scale_is_a_constant_to_derivatives():
    def through(scale):
        state = STATE._replace(loss_scale=scale)
        scaled = ls.scale_loss(jnp.float32(2.0), state)
        value, grads = ls.value_and_grad(cube, state)(2.0)
        return scaled + value + grads + ls.unscale_grads(scaled, state)

    assert float(jax.grad(through)(jnp.float32(8.0))) == 0.0


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (X, {}, "`fun` must be a function"),
        (square, {"value_and_grad": True}, "`value_and_grad` must be a function"),
        (lambda w: w, {}, "scalar"),
        (lambda w: jnp.int32(1), {}, "The loss must be a floating-point array"),
        (lambda w: None, {}, "The loss must be a floating-point array"),
        (lambda w: w.sum(), {"has_aux": True}, "must return a pair"),
        (lambda w: (w.sum(), 1, 2), {"has_aux": True}, "must return a pair"),
    ],
)
@pytest.mark.parametrize("make", DIFFERENTIATE)
def test_bad_functions_are_refused(make, fun, options, message):
    with pytest.raises(TypeError, match=message):
        make(fun, STATE, **options)(X)


def scanned(state, xs):
    return jax.lax.scan(lambda c, x: (c, ls.grad(square, state)(x)), 0, xs)


def with_number(state, number):
    return optax.tree.set(state, loss_scale=number)


CONSTANTS = {
    "a Python number": lambda s: jax.jit(ls.grad(square, with_number(s, 2.0**15)))(X),
    "of NumPy": lambda s: jax.jit(ls.grad(square, jax.device_get(s)))(X),
    "value_and_grad": lambda s: jax.jit(ls.value_and_grad(square, s))(X),
    "retries": lambda s: jax.jit(ls.value_and_grad_with_retries(square, s))(X),
    "in a scan": lambda s: jax.jit(lambda xs: scanned(s, xs))(BATCH),
    "scale_backward": lambda s: jax.jit(ls.scale_backward(square, scale=s))(X),
    "scale_loss": lambda s: jax.jit(lambda w: ls.scale_loss(w, s))(1.0),
    "unscale_grads": lambda s: jax.jit(lambda g: ls.unscale_grads(g, s))(X),
}
NO_CONSTANTS = {
    "a state that is traced but for its scale": lambda s: jax.jit(
        lambda s: ls.grad(square, with_number(s, jnp.float32(2.0**15)))(X)
    )(s),
    "eager": lambda s: ls.value_and_grad(square, s)(X),
    "jitted loss": lambda s: ls.value_and_grad(jax.jit(square), s)(X),
    "vmap": lambda s: jax.vmap(ls.grad(square, s))(BATCH),
    "an argument": lambda s: jax.jit(scanned)(s, BATCH),
    "made inside": lambda _: jax.jit(lambda xs: scanned(RULE.init(), xs))(BATCH),
    "fixed": lambda s: jax.jit(ls.grad(square, ls.FixedLossScale().init()))(X),
}


def told_at_the_next_update(use):
    tx = ls.with_loss_scaling(optax.identity(), RULE)
    use(tx.init(X))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tx.update(X, tx.init(X))
    return [str(w.message).split(",")[0] for w in seen]


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("use", CONSTANTS.values(), ids=CONSTANTS)
def test_a_scale_that_is_a_constant_of_the_program_is_told_at_the_update(use):
    assert told_at_the_next_update(use) == ["The loss scale"]


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("use", NO_CONSTANTS.values(), ids=NO_CONSTANTS)
def test_of_other_scales_nothing_is_said(use):
    assert told_at_the_next_update(use) == []


@pytest.mark.parametrize("argnums", [1, (0, 1)])
def test_a_model_with_functions_among_its_leaves_is_led_to_its_own_library(argnums):
    linear = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    fun = ls.value_and_grad(lambda x, model: model(x), STATE, argnums=argnums)
    with pytest.raises(TypeError, match="`value_and_grad=eqx.filter_value_and_grad`"):
        fun(X, linear)
    # What is not differentiated may be anything.
    ls.value_and_grad(lambda x, model: model(x), STATE)(X, linear)


def test_value_and_grad_calls_the_function_as_jax_does():
    """What a traced program would refuse: branches, prints and stores on the host."""
    seen, new_ref = [], getattr(jax, "new_ref", None) or jax.experimental.mutable_array
    calls = new_ref(jnp.zeros(()))

    def fun(w, x):
        if x[0] > 0:
            seen.append(float(x[0]))
        jax.experimental.io_callback(seen.append, None, 7.0)
        calls[...] += 1.0
        seen.append(w * x)  # a tracer, as those that a model stores
        return square(seen.pop())

    grads = ls.grad(fun, STATE)(X, X)
    jax.effects_barrier()
    np.testing.assert_array_equal(grads, 2 * X**3)
    assert seen == [0.5, 7.0] and calls[...] == 1


def test_argnums_may_be_an_array_of_numpy():
    def loss(a, b, c):
        return a * b * c

    for argnums in (np.array([0, 2]), np.int64(2), np.array(2), (0, -1)):
        ours = ls.grad(loss, STATE, argnums=argnums)(2.0, 3.0, 4.0)
        theirs = jax.grad(loss, argnums=jax.tree.map(int, np.asarray(argnums).tolist()))
        assert_same_bits(
            list(np.atleast_1d(ours)), list(np.atleast_1d(theirs(2.0, 3.0, 4.0)))
        )


def test_float64_of_numpy_is_float32_without_a_warning():
    """Warnings are errors."""
    x, tx = np.ones(2), ls.with_loss_scaling(optax.adam(1e-3))
    assert ls.scale_loss(np.float64(3.0), STATE).dtype == jnp.float32
    assert ls.unscale_grads(x, STATE).dtype == jnp.float32
    assert ls.max_magnitude(x).dtype == jnp.float32
    updates, _ = tx.update(x, tx.init(jnp.ones(2)), value=np.float64(1.0))
    assert updates.dtype == jnp.float32
    jax.grad(ls.scale_backward(jnp.sum, np.float64(3.0)))(x)
    ls.check_loss_scale(RULE.init(), grads=x, value=np.float64(1.0))
    assert ls.gradient_report(x).size == 2 and ls.all_finite(x)
