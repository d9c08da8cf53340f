"""What cannot be differentiated at a scale is refused, and the words name a way out."""

import functools
import inspect

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ls

X = np.float32([0.5, -1.0, 2.0])
STATE = ls.FixedLossScale(8.0).init()
TX = ls.with_loss_scaling(optax.sgd(0.1))
MLP = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.wrap_key_data(np.zeros(2, "uint32")))
LINEAR = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
BATCH_NORM = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
MAKERS = [ls.value_and_grad, ls.grad, ls.value_and_grad_with_retries]
retries = functools.partial(ls.value_and_grad_with_retries, state=STATE)
new_ref = getattr(jax, "new_ref", None) or jax.experimental.mutable_array
CALLS = new_ref(np.float32(0))
by_axis = ls.scale_block(lambda x: jnp.sum(jnp.sin(x)), axis_name="data")


def backward(fun, scale=8.0):
    return ls.scale_backward(fun, scale)


def changes(x, held):
    held[0] = 2 * x
    return jnp.sum(x)


def prints(x):
    jax.experimental.io_callback(print, None, x)
    return jnp.sum(x)


def counts(x):
    CALLS[...] += 1.0
    return jnp.sum(x)


def slope(x):
    return jnp.sum(retries(jnp.vdot)(x, x)[1])


def apply(x, model):
    return jnp.sum(model(x))


# For each maker: words, a loss, options, arguments.
LOSSES = [
    ("`fun` must be a function, got .* comes first", X, {}, (X,)),
    ("`value_and_grad` must be a function", jnp.sum, {"value_and_grad": True}, (X,)),
    ("scalar", lambda w: w, {}, (X,)),
    ("The loss must be a floating-point array", lambda w: jnp.int32(1), {}, (X,)),
    ("The loss must be a floating-point array", lambda w: None, {}, (X,)),
    ("must return a pair", jnp.sum, {"has_aux": True}, (X,)),
    ("must return a pair", lambda w: (w.sum(), 1, 2), {"has_aux": True}, (X,)),
    ("=eqx.filter_value_and_grad`", apply, {"argnums": 1}, (X, MLP)),
    ("=eqx.filter_value_and_grad`", apply, {"argnums": (0, 1)}, (X, MLP)),
    ("=nnx.value_and_grad`", apply, {}, (X, BATCH_NORM)),
    ("=nnx.value_and_grad`", lambda models: 0.0, {}, ([LINEAR],)),
]


@pytest.mark.parametrize(("words", "fun", "options", "args"), LOSSES)
@pytest.mark.parametrize("make", MAKERS)
def test_loss_without_gradients_is_refused(make, words, fun, options, args):
    with pytest.raises(TypeError, match=words):
        make(fun, STATE, **options)(*args)


TYPE_ERRORS = {
    "The loss must be a floating": lambda: ls.scale_loss(jnp.int32(1), STATE),
    "`fun` must be a function, got 3.* `scale_block": lambda: ls.scale_block(3),
    "`fun` must be a function, got 3.* `scale_backward": lambda: backward(3),
    "=nnx.value_and_grad`": lambda: ls.grad(apply, STATE)(X, model=[BATCH_NORM]),
    "`scale` must be .* use `scale_block`": lambda: ls.scale_backward(jnp.sum),
    "forward-mode .*custom_vjp": lambda: jax.jvp(backward(jnp.sin), (X,), (X,)),
    "`fun` must be free of effects .*IOEffect": lambda: backward(prints)(X),
    "must be free of effects .*IOEffect": lambda: ls.scale_block(prints)(X),
    "`fun` must be free of effects": lambda: retries(counts)(X),
}
VALUE_ERRORS = {
    "`headroom` must be .* 0 to 126": lambda: ls.scale_block(apply, headroom=-1),
    "`dtype` must be a floating": lambda: ls.scale_block(apply, dtype="int8"),
    "`scale` must be a number from 2": lambda: backward(jnp.sum, 0.0)(X),
    "number from 2.* got array": lambda: backward(jnp.sum, X)(X),
    "pass what its `init": lambda: backward(jnp.sum, TX)(X),
    "`max_retries` must be": lambda: retries(jnp.sum, max_retries=-1),
    "`backoff_factor` must be": lambda: retries(jnp.sum, backoff_factor=1.0),
    "`axis_name` must name an axis": lambda: jax.grad(by_axis)(X),
    "Reverse-mode .* does not work": lambda: jax.grad(slope)(X),
}
for wrap in (ls.scale_block, backward, retries):
    where = r"`\(args, kwargs\)\[0\]\[1\]\[0\]`"
    VALUE_ERRORS[f"must not change its .*{where}"] = lambda f=wrap: f(changes)(X, [X])
REFUSED = [(TypeError, *row) for row in TYPE_ERRORS.items()]
REFUSED += [(ValueError, *row) for row in VALUE_ERRORS.items()]


@pytest.mark.parametrize(("error", "words", "use"), REFUSED)
def test_call_is_refused(error, words, use):
    with pytest.raises(error, match=words):
        use()
    assert float(CALLS[...]) == 0


BOUND = [
    lambda method: nnx.grad(ls.autocast(method)),
    lambda method: nnx.grad(backward(method)),
    lambda method: nnx.grad(functools.partial(ls.scale_block(method))),
    lambda method: ls.grad(method, STATE, value_and_grad=nnx.value_and_grad),
    lambda method: retries(method, value_and_grad=nnx.value_and_grad),
]


@pytest.mark.parametrize("differentiated", BOUND)
def test_bound_method_is_refused_as_by_nnx(differentiated):
    call = nnx.Linear(8, 8, rngs=nnx.Rngs(0)).__call__
    try:
        nnx.grad(call)
    except ValueError:
        with pytest.raises(ValueError, match="does not support bound methods"):
            differentiated(functools.partial(call))(X)
    cast = ls.autocast(call)
    assert cast(np.ones((2, 8))).shape == (2, 8)
    assert inspect.signature(cast) == inspect.signature(call)


@pytest.mark.parametrize("make", MAKERS)
def test_model_that_loses_nothing_is_accepted(make):
    """It is not differentiated, or has nothing but parameters."""
    jax.eval_shape(lambda x: make(apply, STATE)(x, MLP), X)
    linear = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    for fun, argnums, args in (
        (apply, 0, (X, linear)),
        (lambda model, x: apply(x, model), -1, (linear, X)),
    ):
        grads = make(fun, STATE, argnums=argnums)(*args)
        grads = grads if make is ls.grad else grads[1]
        np.testing.assert_array_equal(grads, linear.kernel[...][:, 0])
    np.testing.assert_array_equal(by_axis(X), jnp.sum(jnp.sin(X)))
