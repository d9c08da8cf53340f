"""value_and_grad and grad, and what goes for all that scales a loss."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, enable_x64
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

STATE = ls.FixedLossScale(2.0**12).init()


def loss_fn(params, x, power=2):
    return jnp.sum(params["w"] * x) ** power + jnp.sum(params["b"])


PARAMS = {"w": jnp.arange(3.0), "b": jnp.ones(2)}
X = jnp.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize("jit", [False, True])
def test_value_and_gradients_equal_jaxs_bit_for_bit(jit):
    ours = ls.value_and_grad(loss_fn, STATE)
    theirs = jax.value_and_grad(loss_fn)
    if jit:
        ours, theirs = jax.jit(ours), jax.jit(theirs)
    assert_same_bits(ours(PARAMS, X), theirs(PARAMS, X))
    assert_same_bits(ours(PARAMS, x=X, power=3), theirs(PARAMS, x=X, power=3))


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), [0, 1]])
def test_argnums(argnums):
    expected = jax.value_and_grad(loss_fn, argnums)(PARAMS, X)
    assert_same_bits(
        ls.value_and_grad(loss_fn, STATE, argnums=argnums)(PARAMS, X), expected
    )
    assert_same_bits(ls.grad(loss_fn, STATE, argnums=argnums)(PARAMS, X), expected[1])


def test_has_aux():
    def with_aux(params, x):
        return loss_fn(params, x), {"x": x, "step": 3}

    expected = jax.value_and_grad(with_aux, has_aux=True)(PARAMS, X)
    actual = ls.value_and_grad(with_aux, STATE, has_aux=True)(PARAMS, X)
    assert_same_bits(actual, expected)
    grads, aux = ls.grad(with_aux, STATE, has_aux=True)(PARAMS, X)
    assert_same_bits((grads, aux), (expected[1], expected[0][1]))


def test_holomorphic_and_complex_gradients_keep_their_type_and_both_parts():
    z = jnp.array(1 + 2j, jnp.complex64)
    ours = ls.value_and_grad(lambda z: z**3, STATE, holomorphic=True)(z)
    assert_same_bits(ours, jax.value_and_grad(lambda z: z**3, holomorphic=True)(z))
    real_loss = ls.grad(lambda z: jnp.abs(z) ** 2, STATE)(z)
    assert_same_bits(real_loss, jax.grad(lambda z: jnp.abs(z) ** 2)(z))


def test_allow_int_gives_float0_as_jax_does():
    def fun(args):
        return args["x"] ** 2 * args["n"]

    args = {"x": jnp.float32(3), "n": jnp.int32(2)}
    grads = ls.grad(fun, STATE, allow_int=True)(args)
    assert_same_bits(grads, jax.grad(fun, allow_int=True)(args))
    assert grads["n"].dtype == jax.dtypes.float0
    assert ls.all_finite(grads)
    with pytest.raises(TypeError, match="allow_int"):
        ls.grad(fun, STATE)(args)


def test_float64_gradients_are_unscaled_in_float64_by_any_scale():
    """A reciprocal rounded to float32 would leave an error of 1e-8."""
    with enable_x64(True):
        state = ls.FixedLossScale(1000.0).init()
        value, grads = ls.value_and_grad(lambda x: x**3, state)(jnp.float64(1 / 3))
        assert value.dtype == grads.dtype == jnp.float64
        np.testing.assert_allclose(grads, 1 / 3, rtol=1e-15)


def test_float16_gradients_that_vanish_without_a_scale_are_exact_with_one():
    def tiny_loss(w):
        return jnp.sum((w.astype(jnp.float16) * jnp.float16(0.5)).astype(jnp.float32))

    def loss(w):
        return 2.0**-24 * tiny_loss(w)

    w = jnp.ones(4)
    np.testing.assert_array_equal(jax.grad(loss)(w), 0.0)
    np.testing.assert_array_equal(ls.grad(loss, STATE)(w), 2.0**-25)


def test_the_reported_value_is_never_multiplied():
    state = ls.FixedLossScale(2.0**100).init()
    value, grads = jax.jit(ls.value_and_grad(lambda w: w * 1e30, state))(1.0)
    assert value == np.float32(1e30)
    assert not np.isfinite(grads), "the gradients did overflow"


def test_the_product_is_not_computed():
    state = ls.FixedLossScale(3.0).init()
    fun = ls.value_and_grad(lambda w: jnp.sin(w), state)
    hlo = jax.jit(fun).lower(1.0).compile().as_text()
    plain = jax.jit(jax.value_and_grad(jnp.sin)).lower(1.0).compile().as_text()
    # One product for the cotangent, one for the reciprocal.
    assert hlo.count(" multiply(") <= plain.count(" multiply(") + 2


def test_the_value_keeps_its_type():
    def fun(w):
        return jnp.sum(w.astype(jnp.bfloat16))

    value, _ = ls.value_and_grad(fun, STATE)(jnp.ones(3))
    assert value.dtype == jnp.bfloat16


def test_the_scale_of_the_state_passed_in_is_used_and_no_other():
    rule = ls.DynamicLossScale(init_scale=4.0, growth_interval=1)
    state = rule.init()
    for _ in range(5):
        value, grads = ls.value_and_grad(lambda w: w**2, state)(3.0)
        assert (float(value), float(grads)) == (9.0, 6.0)
        state = rule.update(state, True)
    assert float(state.loss_scale) == 128.0


def test_a_float16_loss_warns_once_while_tracing():
    def half_loss(w):
        return jnp.sum(w.astype(jnp.float16))

    step = jax.jit(ls.value_and_grad(half_loss, STATE))
    with pytest.warns(UserWarning, match="The loss is float16") as record:
        for _ in range(3):
            value, _ = step(jnp.ones(2))
    assert len(record) == 1 and value.dtype == jnp.float16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_losses_do_not_warn(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ls.grad(lambda w: jnp.sum(w.astype(dtype)), STATE)(jnp.ones(2))


def test_derivatives_of_the_scaled_gradient_are_right():
    hessian = jax.grad(lambda w: ls.grad(lambda w: w**3, STATE)(w))(2.0)
    assert float(hessian) == 12.0


def test_the_scale_itself_is_a_constant_to_derivatives():
    def through(scale):
        state = STATE._replace(loss_scale=scale)
        scaled = ls.scale_loss(jnp.float32(2.0), state)
        value, grads = ls.value_and_grad(lambda w: w**3, state)(2.0)
        return scaled + value + grads + ls.unscale_grads(scaled, state)

    assert float(jax.grad(through)(jnp.float32(8.0))) == 0.0


@pytest.mark.parametrize("loss", [1, jnp.int32(1), "1", None, (1.0, 2.0), {}])
def test_a_loss_that_is_no_floating_point_array_is_refused(loss):
    with pytest.raises(TypeError, match="The loss must be a floating-point array, got"):
        ls.scale_loss(loss, STATE)
    with pytest.raises(TypeError, match="The loss must be a floating-point array, got"):
        ls.value_and_grad(lambda w: loss, STATE)(1.0)


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(TypeError, match="scalar"):
        ls.value_and_grad(lambda w: w, STATE)(jnp.ones(2))


def test_a_list_is_a_pair_as_it_is_for_jax():
    fun = ls.value_and_grad(lambda w: [w**2, "aux"], STATE, has_aux=True)
    (value, aux), grads = fun(3.0)
    assert (float(value), aux, float(grads)) == (9.0, "aux", 6.0)


@pytest.mark.parametrize("fun", [3, None, jnp.ones(2)])
def test_what_is_no_function_is_refused_before_it_is_called(fun):
    for differentiate in (ls.value_and_grad, ls.grad):
        with pytest.raises(TypeError, match="`fun` must be a function .* got"):
            differentiate(fun, STATE)


@pytest.mark.parametrize("output", [1.0, (1.0, 2.0, 3.0), [1.0]])
def test_has_aux_without_a_pair_is_refused(output):
    with pytest.raises(TypeError, match=r"`fun` must return a pair \(loss, aux\)"):
        ls.value_and_grad(lambda w: output, STATE, has_aux=True)(1.0)


def test_the_optimizer_state_may_be_the_whole_chain():
    tx = optax.chain(optax.clip(1.0), ls.with_loss_scaling(optax.sgd(1.0)))
    value, grads = ls.value_and_grad(lambda w: w**2, tx.init(1.0))(3.0)
    assert (float(value), float(grads)) == (9.0, 6.0)


DYNAMIC = ls.DynamicLossScale().init()
BATCH = jnp.ones((2, 3))


def square(w):
    return jnp.sum(w**2)


FROZEN = {
    "value_and_grad": lambda s: jax.jit(ls.value_and_grad(square, s))(X),
    "grad": lambda s: jax.jit(ls.grad(square, s))(X),
    "in a scan": lambda s: jax.jit(
        lambda xs: jax.lax.scan(lambda c, x: (c, ls.grad(square, s)(x)), 0, xs)
    )(BATCH),
    "in a shard_map": lambda s: jax.jit(
        jax.shard_map(
            ls.grad(square, s),
            mesh=jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=P(),
            out_specs=P(),
        )
    )(X),
    "scale_loss": lambda s: jax.jit(lambda w: ls.scale_loss(square(w), s))(X),
    "unscale_grads": lambda s: jax.jit(lambda g: ls.unscale_grads(g, s))(X),
}


@pytest.mark.parametrize("use", FROZEN.values(), ids=FROZEN)
def test_a_scale_that_is_a_constant_of_the_program_is_warned_of(use):
    with pytest.warns(UserWarning, match="^The loss scale, 32768, is a constant of"):
        use(DYNAMIC)
    overflowed = ls.DynamicLossScale().update(DYNAMIC, False)
    with pytest.warns(UserWarning, match="16384"):
        use(jax.device_get(overflowed))


NOT_FROZEN = {
    "eager": lambda s: ls.value_and_grad(square, s)(X),
    "jitted loss": lambda s: ls.value_and_grad(jax.jit(square), s)(X),
    "vmap": lambda s: jax.vmap(ls.grad(square, s))(BATCH),
    "eager scan": lambda s: jax.lax.scan(
        lambda c, x: (c, ls.grad(square, s)(x)), 0, BATCH
    ),
    "remat": lambda s: jax.grad(jax.checkpoint(lambda w: ls.scale_loss(square(w), s)))(
        X
    ),
    "an argument": lambda s: jax.jit(lambda s, w: ls.grad(square, s)(w))(s, X),
    "made inside": lambda s: jax.jit(
        lambda w: ls.grad(square, ls.DynamicLossScale().init())(w)
    )(X),
    "scan over a carry": lambda s: jax.lax.scan(
        lambda s, x: (s, ls.grad(square, s)(x)), s, BATCH
    ),
    "fixed": lambda s: jax.jit(ls.value_and_grad(square, STATE))(X),
    "read": lambda s: jax.jit(lambda w: w * ls.get_loss_scale(s))(X),
}


@pytest.mark.parametrize("use", NOT_FROZEN.values(), ids=NOT_FROZEN)
def test_other_states_are_not_warned_of(use):
    use(DYNAMIC)  # warnings are errors


@pytest.mark.filterwarnings("ignore:The loss scale")
@pytest.mark.parametrize("frozen, skipped", [(True, 15), (False, 9)])
def test_why_it_is_warned_of(frozen, skipped):
    """The scale falls in the state, and the program goes on with the first one."""
    tx = ls.with_loss_scaling(optax.sgd(0.1), ls.DynamicLossScale(init_scale=2.0**24))

    def loss_fn(w):
        return jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)

    w = jnp.ones(3)
    opt_state = first = tx.init(w)
    fun = jax.jit(lambda s: ls.grad(loss_fn, first if frozen else s)(w))
    for _ in range(15):
        _, opt_state = tx.update(fun(opt_state), opt_state, w)
    assert int(ls.get_loss_scale_state(opt_state).skipped_steps) == skipped
