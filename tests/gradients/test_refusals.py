"""What is refused: the call, and the words that name the argument or the way out."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shared import new_ref

import optax_lossscale as ls

X = np.float32([0.5, -1.0, 2.0])
STATE = ls.FixedLossScale(8.0).init()
TX = ls.with_loss_scaling(optax.sgd(0.1))
MLP = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.wrap_key_data(np.zeros(2, "uint32")))
LINEAR = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
BATCH_NORM = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
CALLS = new_ref(np.float32(0))
retries = functools.partial(ls.value_and_grad_with_retries, state=STATE)
backward = functools.partial(ls.scale_backward, scale=8.0)
by_axis = ls.scale_block(lambda x: jnp.sum(jnp.sin(x)), axis_name="data")


def changes(x, held):
    held[0] = 2 * x
    return jnp.sum(x)


def prints(x):
    jax.experimental.io_callback(print, None, x)
    return jnp.sum(x)


def counts(x):
    CALLS[...] += 1.0
    return jnp.sum(x)


def apply(x, model):
    return jnp.sum(model(x))


MAKERS = [ls.value_and_grad, ls.grad, ls.value_and_grad_with_retries]
# What each of them refuses: a loss, options, arguments.
LOSSES = [
    (X, {}, (X,), "`fun` must be a function, got .* comes first"),
    (jnp.sum, {"value_and_grad": 1}, (X,), "`value_and_grad` must be a function"),
    (lambda w: w, {}, (X,), "scalar"),
    (lambda w: jnp.int32(1), {}, (X,), "The loss must be a floating-point array"),
    (lambda w: None, {}, (X,), "The loss must be a floating-point array"),
    (jnp.sum, {"has_aux": True}, (X,), "must return a pair"),
    (lambda w: (w.sum(), 1, 2), {"has_aux": True}, (X,), "must return a pair"),
    (jnp.sum, {"value_and_grad": ls.grad}, (X,), "`ls.grad`, which also scales"),
    *(
        (jnp.sum, {"value_and_grad": f}, (X,), rf"must return \(\(loss.*{f.__name__}")
        for f in (jax.grad, nnx.grad)
    ),
    (apply, {"argnums": 1}, (X, MLP), "at argument 1.*=eqx.filter_value_and_grad`"),
    (jnp.sum, {}, (jnp.sin,), "at argument 0. For an Equinox module"),
    (apply, {"argnums": (0, 1)}, (X, MLP), "=eqx.filter_value_and_grad`"),
    (apply, {"argnums": 2}, (MLP, X), "requires at least 3 positional arguments"),
    (apply, {}, (X, BATCH_NORM), "=nnx.value_and_grad`"),
    (lambda models: 0.0, {}, ([LINEAR],), "=nnx.value_and_grad`"),
]


@pytest.mark.parametrize(
    ("fun", "options", "args", "words"), LOSSES, ids=[row[-1] for row in LOSSES]
)
@pytest.mark.parametrize("make", MAKERS)
def test_wrong_loss_or_model_is_refused(make, fun, options, args, words):
    with pytest.raises(TypeError, match=words):
        make(fun, STATE, **options)(*args)


CHANGED = r"must not change its .*`\(args, kwargs\)\[0\]\[1\]\[0\]`"
ERRORS = {
    TypeError: [
        (lambda: ls.scale_loss(jnp.int32(1), STATE), "The loss must be a floating"),
        (lambda: ls.scale_block(3), "`fun` must be a function, got 3.* `scale_block"),
        (lambda: backward(3), "`fun` must be a function, got 3.* `scale_backward"),
        (lambda: ls.scale_backward(jnp.sum), "argument: 'scale'.* use `scale_block`"),
        *(
            (lambda make=make: make(jnp.sum), f"`{make.__name__}`: .*'state'.* second")
            for make in MAKERS
        ),
        (lambda: ls.grad(apply, STATE)(X, model=[BATCH_NORM]), "=nnx.value_and_grad`"),
        (lambda: jax.jvp(backward(jnp.sin), (X,), (X,)), "forward-mode .*custom_vjp"),
        (lambda: backward(prints)(X), "`fun` must be free of effects .*IOEffect"),
        (lambda: ls.scale_block(prints)(X), "must be free of effects .*IOEffect"),
        (lambda: retries(counts)(X), "`fun` must be free of effects"),
    ],
    ValueError: [
        (lambda: jax.jit(lambda x: ls.scale_block(apply, headroom=x))(8), "a static a"),
        (lambda: ls.scale_loss(STATE, 1.0), r"call is `scale_loss\(loss, opt_state"),
        (lambda: ls.unscale_grads(STATE, X), r"call is `unscale_grads\(grads, opt_"),
        (lambda: backward(jnp.sum, scale=0.0)(X), "`scale` must be a number from 2"),
        (lambda: backward(jnp.sum, scale=X)(X), "number from 2.* got array"),
        (lambda: backward(jnp.sum, scale=TX)(X), "pass the result of its `init"),
        (lambda: jax.grad(by_axis)(X), "`axis_name` must name an axis"),
        (lambda: jax.grad(lambda x: retries(jnp.sum)(x)[0])(X), "Reverse-mode .* not"),
        *((lambda f=f: f(changes)(X, [X]), CHANGED) for f in (backward, retries)),
        (lambda: ls.scale_block(changes)(X, [X]), CHANGED),
    ],
}


REFUSED = [(error, *row) for error, rows in ERRORS.items() for row in rows]


@pytest.mark.parametrize(
    ("error", "call", "words"), REFUSED, ids=[row[-1] for row in REFUSED]
)
def test_wrong_argument_or_function_is_refused(error, call, words):
    with pytest.raises(error, match=words):
        call()
    assert float(CALLS[...]) == 0


BOUND = {
    "autocast": lambda method: nnx.grad(ls.autocast(method, "float16")),
    "scale_backward": lambda method: nnx.grad(backward(method)),
    "scale_block": lambda method: nnx.grad(functools.partial(ls.scale_block(method))),
    "grad": lambda method: ls.grad(method, STATE, value_and_grad=nnx.value_and_grad),
    "retries": lambda method: retries(method, value_and_grad=nnx.value_and_grad),
}


@pytest.mark.parametrize("differentiated", BOUND.values(), ids=BOUND)
def test_bound_method_is_refused_as_by_nnx(differentiated):
    with contextlib.suppress(ValueError):
        nnx.grad(LINEAR.__call__)
        pytest.skip("this Flax differentiates bound methods")
    with pytest.raises(ValueError, match="does not support bound methods"):
        differentiated(functools.partial(LINEAR.__call__))(X)


# Models that are not differentiated, or have nothing but parameters.
ACCEPTED = {
    "equinox beside": (apply, 0, (X, MLP)),
    "nnx beside": (apply, 0, (X, LINEAR)),
    "nnx in front": (lambda model, x: apply(x, model), -1, (LINEAR, X)),
}


@pytest.mark.parametrize(("fun", "argnums", "args"), ACCEPTED.values(), ids=ACCEPTED)
@pytest.mark.parametrize("make", MAKERS)
def test_model_beside_the_parameters_or_of_parameters_alone_is_accepted(
    make, fun, argnums, args
):
    jax.eval_shape(lambda: make(fun, STATE, argnums=argnums)(*args))


def test_block_outside_of_its_axis_still_returns_its_value():
    assert by_axis(X) == pytest.approx(np.sin(X).sum())
