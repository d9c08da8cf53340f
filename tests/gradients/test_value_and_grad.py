"""value_and_grad and grad, and what goes for all that scales a loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, on_mesh
from jax.sharding import PartitionSpec as P

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
    "a real loss of a complex number": (lambda z: jnp.abs(z) ** 2, {}, (1 + 2j,)),
    "allow_int": (lambda a: a[0] ** 2 * a[1], {"allow_int": True}, ((3.0, 2),)),
    **{
        f"argnums {argnums}": (loss_fn, {"argnums": argnums}, (PARAMS, X))
        for argnums in (1, -1, (0,), [1, 0])
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


OURS, THEIRS = ls.value_and_grad(loss_fn, STATE), jax.value_and_grad(loss_fn)


def test_compiled_value_and_gradients_take_keywords_and_equal_jaxs():
    both = (f(PARAMS, x=X, power=3) for f in map(jax.jit, (OURS, THEIRS)))
    assert_same_bits(*both)


def test_float16_gradients_that_vanish_without_a_scale_are_exact_with_one():
    def loss(w):
        half = w.astype(jnp.float16) * jnp.float16(0.5)
        return 2.0**-24 * jnp.sum(half.astype(jnp.float32))

    np.testing.assert_array_equal(jax.grad(loss)(X), 0.0)
    np.testing.assert_array_equal(ls.grad(loss, STATE)(X), 2.0**-25)


def test_the_value_is_never_multiplied():
    state = ls.FixedLossScale(2.0**100).init()
    value, grads = jax.jit(ls.value_and_grad(lambda w: w * 1e30, state))(1.0)
    assert value == np.float32(1e30)
    assert not np.isfinite(grads), "the gradients did overflow"


@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_a_float16_loss_warns_once_while_tracing(make):
    @jax.jit
    def step(w):
        return make(lambda w: jnp.sum(w.astype(jnp.float16)), STATE)(w)[0]

    with pytest.warns(UserWarning, match="^The loss is float16") as record:
        losses = [step(jnp.ones(2)) for _ in range(2)]
    assert [w.filename for w in record] == [__file__]
    assert losses[0].dtype == jnp.float16


@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_the_cast_that_the_warning_names_is_the_one_that_helps():
    def library_loss(logits):
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    casts = {
        "none": lambda logits: library_loss(logits),
        "of the loss": lambda logits: library_loss(logits).astype(jnp.float32),
        "of its input": lambda logits: library_loss(logits.astype(jnp.float32)),
    }
    grown = RULE.init()._replace(loss_scale=jnp.float32(2.0**16))
    finite = {
        name: bool(ls.all_finite(ls.grad(loss, grown)(jnp.ones((8, 3), jnp.float16))))
        for name, loss in casts.items()
    }
    assert finite == {"none": False, "of the loss": False, "of its input": True}


def test_derivatives_of_gradients_are_right_and_the_scale_is_a_constant_to_them():
    assert float(jax.grad(ls.grad(cube, STATE))(2.0)) == 12.0

    def through(scale):
        state = STATE._replace(loss_scale=scale)
        scaled = ls.scale_loss(jnp.float32(2.0), state)
        value, grads = ls.value_and_grad(cube, state)(2.0)
        return scaled + value + grads + ls.unscale_grads(scaled, state)

    assert float(jax.grad(through)(jnp.float32(8.0))) == 0.0


NUMBERS = "The loss must be a floating-point array"
PAIRS = r"must return a pair \(loss, aux\)"


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        *((fun, {}, "`fun` must be a function .* got") for fun in (3, None, X)),
        (square, {"value_and_grad": True}, "`value_and_grad` must be a function that"),
        *(
            (square, {"value_and_grad": wrong}, "`value_and_grad` must return what `ja")
            for wrong in (lambda fun, has_aux: fun, jax.grad)
        ),
        (lambda w: w, {}, "scalar"),
        *((lambda w, x=x: x, {}, NUMBERS) for x in (1, jnp.int32(1), "1", None, {})),
        (lambda w: w.sum(), {"has_aux": True}, PAIRS),
        (lambda w: (w.sum(), 1, 2), {"has_aux": True}, PAIRS),
    ],
)
@pytest.mark.parametrize("make", DIFFERENTIATE)
def test_bad_functions_are_refused(make, fun, options, message):
    with pytest.raises(TypeError, match=message):
        make(fun, STATE, **options)(X)


def scanned(state, xs):
    return jax.lax.scan(lambda c, x: (c, ls.grad(square, state)(x)), 0, xs)


CONSTANTS = {
    "value_and_grad": lambda s: jax.jit(ls.value_and_grad(square, s))(X),
    "retries": lambda s: jax.jit(ls.value_and_grad_with_retries(square, s))(X),
    "in a scan": lambda s: jax.jit(lambda xs: scanned(s, xs))(BATCH),
    "in a shard_map": lambda s: on_mesh(ls.grad(square, s), P(), P())(X),
    "scale_backward": lambda s: jax.jit(ls.scale_backward(square, scale=s))(X),
    "scale_loss": lambda s: jax.jit(lambda w: ls.scale_loss(w, s))(1.0),
    "unscale_grads": lambda s: jax.jit(lambda g: ls.unscale_grads(g, s))(X),
}
NO_CONSTANTS = {
    "eager": lambda s: ls.value_and_grad(square, s)(X),
    "jitted loss": lambda s: ls.value_and_grad(jax.jit(square), s)(X),
    "vmap": lambda s: jax.vmap(ls.grad(square, s))(BATCH),
    "eager scan": lambda s: scanned(s, BATCH),
    "remat": lambda s: jax.grad(jax.checkpoint(lambda w: ls.scale_loss(w, s)))(1.0),
    "an argument": lambda s: jax.jit(scanned)(s, BATCH),
    "made inside": lambda _: jax.jit(lambda xs: scanned(RULE.init(), xs))(BATCH),
    "carry": lambda s: jax.lax.scan(lambda s, x: (s, scanned(s, x)), s, BATCH[None]),
    "fixed": lambda s: jax.jit(ls.value_and_grad(square, STATE))(X),
    "read": lambda s: jax.jit(lambda w: w * ls.get_loss_scale(s))(X),
}


@pytest.mark.parametrize("use", CONSTANTS.values(), ids=CONSTANTS)
def test_a_scale_that_is_a_constant_of_the_program_is_warned_of(use):
    restored = jax.device_get(RULE.update(RULE.init(), False))
    for state, scale in ((RULE.init(), 32768), (restored, 16384)):
        message = f"^The loss scale, {scale}, is a constant of the function"
        with pytest.warns(UserWarning, match=message) as record:
            use(state)
        assert len(record) == 1


@pytest.mark.parametrize("use", NO_CONSTANTS.values(), ids=NO_CONSTANTS)
def test_other_states_are_not_warned_of(use):
    use(RULE.init())  # warnings are errors
