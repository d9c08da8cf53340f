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
PARAMS = {"w": np.float32([0, 1, 2]), "b": np.ones(2, np.float32)}
X = np.float32([0.5, -1.0, 2.0])
BATCH = np.ones((2, 3), np.float32)
DIFFERENTIATE = (ls.value_and_grad, ls.grad, ls.value_and_grad_with_retries)


def loss_fn(params, x, power=2):
    return jnp.sum(params["w"] * x) ** power + jnp.sum(params["b"])


def with_aux(params, x):
    return [jnp.vdot(params["w"], x), {"x": x, "step": 3}]


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
    def results(*args):
        *retried, _ = ls.value_and_grad_with_retries(fun, STATE, **options)(*args)
        ours = ls.value_and_grad(fun, STATE, **options)(*args)
        alone = ls.grad(fun, STATE, **options)(*args)
        return ours, tuple(retried), alone, jax.value_and_grad(fun, **options)(*args)

    # Eager, the Python number in the auxiliary output stays one.
    run = results if "has_aux" in options else jax.jit(results)
    ours, retried, alone, expected = run(*args)
    assert_same_bits(ours, expected)
    assert_same_bits(retried, expected)
    value, grads = expected
    assert_same_bits(alone, (grads, value[1]) if "has_aux" in options else grads)


def test_compiled_gradients_take_keywords_and_equal_jaxs():
    ours, theirs = ls.value_and_grad(loss_fn, STATE), jax.value_and_grad(loss_fn)
    assert_same_bits(*(jax.jit(f)(PARAMS, x=X, power=3) for f in (ours, theirs)))


def test_the_value_is_never_multiplied():
    state = ls.FixedLossScale(2.0**100).init()
    value, grads = jax.jit(ls.value_and_grad(lambda w: w * 1e30, state))(1.0)
    assert float(value) == np.float32(1e30)
    assert not np.isfinite(grads), "the gradients did overflow"


def test_the_scale_is_a_constant_to_derivatives():
    def through(scale):
        state = STATE._replace(loss_scale=scale)
        scaled = ls.scale_loss(jnp.float32(2.0), state)
        value, grads = ls.value_and_grad(cube, state)(2.0)
        return scaled + value + grads + ls.unscale_grads(scaled, state)

    assert float(jax.jit(jax.grad(through))(8.0)) == 0.0


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


def by_hand(state, w):
    scaled = jax.grad(lambda w: ls.scale_loss(square(w), state))(w)
    return ls.unscale_grads(scaled, state)


# Gradients at the scale of a state that is closed over.
CONSTANTS = {
    "value_and_grad": lambda s: ls.value_and_grad(square, s)(X)[1],
    "retries": lambda s: ls.value_and_grad_with_retries(square, s)(X)[1],
    "by hand": lambda s: by_hand(s, X),
}


def told_in_a_step(use, run):
    """What is said of a step that gets another state than its gradients."""
    tx = ls.with_loss_scaling(optax.identity(), RULE)
    state = tx.init(X)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(lambda opt_state: tx.update(use(state), opt_state, X), tx.init(X))
    return [str(w.message).split(",")[0] for w in seen]


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("use", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_scale_is_told_where_it_reaches_a_traced_update(use):
    assert told_in_a_step(use, jax.eval_shape) == ["The loss scale"]
    # What runs eagerly reads the scale each time.
    assert told_in_a_step(use, lambda step, state: step(state)) == []


@pytest.mark.usefixtures("new_process")
def test_the_constant_scale_of_a_fixed_rule_is_right():
    fixed = ls.FixedLossScale().init()
    assert told_in_a_step(lambda _: ls.grad(square, fixed)(X), jax.eval_shape) == []


@pytest.mark.parametrize("argnums", [1, (0, 1)])
def test_a_model_with_functions_is_led_to_its_own_library(argnums):
    key = jax.random.wrap_key_data(np.zeros(2, np.uint32))
    model = eqx.filter_jit(eqx.nn.MLP)(3, "scalar", 4, 1, key=key)
    fun = ls.value_and_grad(lambda x, model: model(x), STATE, argnums=argnums)
    with pytest.raises(TypeError, match="`value_and_grad=eqx.filter_value_and_grad`"):
        fun(X, model)
    # What is not differentiated may be anything.
    fun = ls.value_and_grad(lambda x, model: model(x), STATE)
    jax.eval_shape(lambda x: fun(x, model), X)


def test_value_and_grad_calls_the_function_as_jax_does():
    """What a traced program would refuse: branches, prints and stores on the host."""
    seen, new_ref = [], getattr(jax, "new_ref", None) or jax.experimental.mutable_array
    calls = new_ref(jnp.float32(0))

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
    assert seen == [0.5, 7.0] and float(calls[...]) == 1


def test_argnums_may_be_an_array_of_numpy():
    def loss(a, b, c):
        return a * b * c

    def both(argnums):
        ours = ls.grad(loss, STATE, argnums=argnums)(2.0, 3.0, 4.0)
        theirs = jax.grad(loss, argnums=np.asarray(argnums).tolist())(2.0, 3.0, 4.0)
        return jax.tree.leaves(ours), jax.tree.leaves(theirs)

    cases = (np.array([0, 2]), np.int64(2), np.array(2), (0, -1))
    for ours, theirs in jax.jit(lambda: [*map(both, cases)])():
        assert_same_bits(ours, theirs)


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
    ls.check_loss_scale(RULE.init(), grads=x, value=np.float64(1.0))
    assert float(ls.gradient_report(x).size) == 2 and ls.all_finite(x)
