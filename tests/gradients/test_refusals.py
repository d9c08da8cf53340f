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
MAKERS = [ls.value_and_grad, ls.grad, ls.value_and_grad_with_retries]
retries = functools.partial(ls.value_and_grad_with_retries, state=STATE)
by_axis = ls.scale_block(lambda x: jnp.sum(jnp.sin(x)), axis_name="data")


def backward(fun, scale=8.0):
    return ls.scale_backward(fun, scale)


def changes(x, held):
    held[0] = 2 * x
    return jnp.sum(x)


def prints(x):
    jax.experimental.io_callback(print, None, x)
    return jnp.sum(x)


def apply(x, model):
    return jnp.sum(model(x))


# For each maker: a loss, options, arguments, words.
LOSSES = [
    (X, {}, (X,), "`fun` must be a function, got .* comes first"),
    (jnp.sum, {"value_and_grad": True}, (X,), "`value_and_grad` must be a function"),
    (lambda w: w, {}, (X,), "scalar"),
    (lambda w: jnp.int32(1), {}, (X,), "The loss must be a floating-point array"),
    (lambda w: None, {}, (X,), "The loss must be a floating-point array"),
    (jnp.sum, {"has_aux": True}, (X,), "must return a pair"),
    (lambda w: (w.sum(), 1, 2), {"has_aux": True}, (X,), "must return a pair"),
    *(
        (apply, {"argnums": argnums}, (X, MLP), "=eqx.filter_value_and_grad`")
        for argnums in (1, (0, 1))
    ),
    (apply, {}, (X, nnx.BatchNorm(3, rngs=nnx.Rngs(0))), "=nnx.value_and_grad`"),
    (lambda models: 0.0, {}, ([LINEAR],), "=nnx.value_and_grad`"),
]


@pytest.mark.parametrize(("fun", "options", "args", "words"), LOSSES)
@pytest.mark.parametrize("make", MAKERS)
def test_loss_without_gradients_is_refused(make, fun, options, args, words):
    with pytest.raises(TypeError, match=words):
        make(fun, STATE, **options)(*args)


effects = (TypeError, "`fun` must be free of effects .*'IOEffect'")
held = (ValueError, r"must not change its .*`\(args, kwargs\)\[0\]\[1\]\[0\]`")
# A call, the error, words.
REFUSED = [
    (lambda: ls.scale_loss(jnp.int32(1), STATE), TypeError, "be a floating-point arr"),
    (lambda: ls.scale_block(3), TypeError, "`fun` must be a function, got 3"),
    (lambda: backward(3), TypeError, "`fun` must be a function, got 3.* comes first"),
    (lambda: ls.scale_block(apply, headroom=-1), ValueError, "`headroom` .* 0 to 126"),
    (
        lambda: ls.scale_block(apply, dtype="int8"),
        ValueError,
        "`dtype` must be a float",
    ),
    (lambda: jax.grad(by_axis)(X), ValueError, "an axis of the surrounding"),
    (lambda: ls.scale_backward(jnp.sum), TypeError, "`scale` .* use `scale_block`"),
    (lambda: backward(jnp.sum, 0.0)(X), ValueError, "`scale` must be a number from 2"),
    (lambda: backward(jnp.sum, X)(X), ValueError, "`scale` must be a number from 2"),
    (lambda: backward(jnp.sum, TX)(X), ValueError, "pass what its `init"),
    (
        lambda: jax.jvp(backward(jnp.sin), (2.0,), (1.0,)),
        TypeError,
        "forward-mode .*custom_vjp",
    ),
    (lambda: backward(prints)(X), *effects),
    (lambda: ls.scale_block(prints)(X), *effects),
    (lambda: ls.scale_block(changes)(X, [X]), *held),
    (lambda: backward(changes)(X, [X]), *held),
    (lambda: retries(changes)(X, [X]), *held),
    (lambda: retries(jnp.sum, max_retries=-1), ValueError, "`max_retries` must be"),
    (lambda: retries(jnp.sum, backoff_factor=1.0), ValueError, "`backoff_factor` must"),
    (
        lambda: jax.grad(lambda x: jnp.sum(retries(jnp.vdot)(x, x)[1]))(X),
        ValueError,
        "Reverse-mode",
    ),
]


@pytest.mark.parametrize(("use", "error", "words"), REFUSED)
def test_call_is_refused(use, error, words):
    with pytest.raises(error, match=words):
        use()


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="jax gives it another name")
def test_retries_refuse_changes_of_references():
    def counting(w):
        calls[...] += 1.0
        return jnp.sum(w)

    calls = jax.new_ref(jnp.float32(0))
    with pytest.raises(TypeError, match="`fun` must be free of effects"):
        retries(counting)(X)
    assert float(calls[...]) == 0


BOUND = {
    "autocast": lambda loss: nnx.grad(ls.autocast(loss)),
    "backward": lambda loss: nnx.grad(backward(loss)),
    "block": lambda loss: nnx.grad(functools.partial(ls.scale_block(loss))),
    "grad": lambda loss: ls.grad(loss, STATE, value_and_grad=nnx.value_and_grad),
    "retries": lambda loss: retries(loss, value_and_grad=nnx.value_and_grad),
}


@pytest.mark.parametrize("differentiated", BOUND.values(), ids=BOUND)
def test_bound_method_is_refused_as_by_nnx(differentiated):
    call = nnx.Linear(8, 8, rngs=nnx.Rngs(0)).__call__
    try:
        nnx.grad(call)
    except ValueError:
        with pytest.raises(ValueError, match="does not support bound methods"):
            differentiated(functools.partial(call))(X)
    assert ls.autocast(call)(np.ones((2, 8))).shape == (2, 8)
    assert inspect.signature(ls.autocast(call)) == inspect.signature(call)


@pytest.mark.parametrize("make", MAKERS)
def test_model_that_loses_nothing_is_accepted(make):
    """It is not differentiated, or has nothing but parameters."""
    jax.eval_shape(lambda x: make(apply, STATE)(x, MLP), X)
    linear = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    for fun, argnums, args in (
        (apply, 0, (X, linear)),
        (lambda model, x: apply(x, model), -1, (linear, X)),
    ):
        found = make(fun, STATE, argnums=argnums)(*args)
        grads = found if make is ls.grad else found[1]
        np.testing.assert_array_equal(grads, linear.kernel[...][:, 0])
    np.testing.assert_array_equal(by_axis(X), jnp.sum(jnp.sin(X)))
