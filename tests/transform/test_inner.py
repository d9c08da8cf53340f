"""The wrapped optimizer: types of its state and updates, and its extra arguments."""

import functools
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, assert_same_types
from training import transformation

import optax_lossscale as ls

pytestmark = [
    pytest.mark.filterwarnings("ignore:. of . parameters are float16"),
    pytest.mark.filterwarnings("ignore:The unscaled gradients are float16"),
]


def of(dtype):
    tree = {"w": np.linspace(-1, 1, 8), "b": 1.0}
    return jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), tree))


FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = "float32", "float16", "bfloat16", "float8_e5m2"
ADAM = optax.adam(5e-3)
INNERS = {
    "adam": ADAM,
    "narrow mu": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    # Their branches must return one type.
    "branches": optax.apply_if_finite(
        optax.conditionally_transform(ADAM, lambda step, **kwargs: step < 1), 3
    ),
}


@pytest.mark.parametrize(
    ("inner", "params", "grads", "mu", "nu", "updates"),
    [
        ("adam", FLOAT32, FLOAT32, FLOAT32, FLOAT32, FLOAT32),
        ("adam", FLOAT32, FLOAT16, FLOAT32, FLOAT32, FLOAT32),
        ("adam", FLOAT16, FLOAT16, FLOAT32, FLOAT32, FLOAT16),
        ("adam", FLOAT16, FLOAT32, FLOAT32, FLOAT32, FLOAT32),
        ("adam", FLOAT8, FLOAT32, FLOAT32, FLOAT32, FLOAT32),
        ("adam", BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16),
        ("narrow mu", FLOAT16, FLOAT16, BFLOAT16, FLOAT32, FLOAT16),
        ("branches", FLOAT16, FLOAT16, FLOAT32, FLOAT32, FLOAT16),
        ("branches", FLOAT16, FLOAT32, FLOAT32, FLOAT32, FLOAT32),
    ],
)
def test_moments_of_float16_and_float8_parameters_are_float32(
    inner, params, grads, mu, nu, updates
):
    """Updates are as wide as the gradients, or as the parameters if these are wider."""
    tx, params = ls.with_loss_scaling(INNERS[inner]), of(params)
    state = jax.eval_shape(tx.init, params)
    assert optax.tree.get(state, "mu")["w"].dtype == mu
    assert optax.tree.get(state, "nu")["w"].dtype == nu
    actual, new_state = jax.eval_shape(tx.update, of(grads), state, params)
    assert_same_types(actual, of(updates))
    assert_same_types(new_state, state)


@pytest.mark.parametrize("inner", INNERS)
def test_restored_float16_state_stays_float16(inner):
    inner, params = INNERS[inner], of(FLOAT16)
    tx, restored = ls.with_loss_scaling(inner), jax.eval_shape(inner.init, params)
    state = jax.eval_shape(tx.init, params)._replace(inner_state=restored)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert_same_types(updates, params)
    assert_same_types(new_state, state)


def test_narrow_gradients_are_squared_in_float32():
    """In float16, the squares of these would be 0."""
    tx, params = ls.with_loss_scaling(ADAM), np.ones(8, np.float32)
    grads = np.full(8, 1e-4, np.float16)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates, -5e-3 * params, rtol=1e-3)


class WeakRule(ls.LossScale):
    """A rule whose numbers have other types than the first ones."""

    def init(self):
        return ls.LossScaleState.create(8.0)

    def update(self, state, grads_finite):
        state = state.record(grads_finite)
        return state._replace(growth_tracker=0, loss_scale=jnp.asarray(4.0))


WEAK = optax.GradientTransformation(
    lambda params: {"rate": jnp.asarray(0.3), "step": 0},
    lambda u, s, params=None: (u, {"rate": jnp.asarray(0.3), "step": s["step"] * 1}),
)


NEVER_SKIPS = ls.FixedLossScale(8.0, skip_nonfinite=False)


@pytest.mark.parametrize("rule", [WeakRule(), NEVER_SKIPS], ids=["skips", "never"])
def test_step_changes_no_type_of_the_state(rule):
    """So one program serves a run. `test_optimizers` tests Optax's own."""
    tx, grads = ls.with_loss_scaling(WEAK, rule), np.ones(4, np.float32)
    state = tx.init(np.ones(4, np.float16))
    _, new_state = tx.update(grads, state)
    assert_same_types(new_state, state)


@pytest.mark.parametrize("check_updates", [False, True], ids=["unchecked", "checked"])
def test_functions_and_names_in_the_state_pass_through(check_updates, around):
    """As those of an Equinox module."""

    def update(grads, name, function, total):
        return grads, (name, function, total + grads)

    inner = transformation(update, "name", jnp.tanh, np.zeros(2, np.float32))
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    step = eqx.filter_jit(tx.update) if around is jax.jit else tx.update
    for factor, sums in ((1.0, [1.0, 1.0]), (np.nan, [0.0, 0.0])):
        grads = np.full(2, factor, np.float32)
        name, function, total = step(grads, tx.init(grads))[1].inner_state
        assert name == "name" and function is jnp.tanh
        np.testing.assert_array_equal(total, sums)


ALL = {"grads_finite", "value", "value_fn"}


@pytest.mark.parametrize(
    ("signature", "taken"),
    [
        # The flag is meant for us: a line search would hand it to the loss.
        (lambda g, s, p=None, **others: (g, s), ALL - {"grads_finite"}),
        (lambda g, s, p=None, value=None: (g, s), {"value"}),
        (lambda g, s, p=None, *, grads_finite, **others: (g, s), ALL),
    ],
    ids=["any", "value", "flag and any"],
)
def test_optimizer_gets_the_extra_arguments_that_it_takes(signature, taken):
    update = mock.create_autospec(signature, side_effect=signature)
    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx, params = ls.with_loss_scaling(inner), of(FLOAT32)
    given = {"grads_finite": True, "value": np.float32(3.0), "value_fn": len}
    tx.update(params, tx.init(params), params, **given)
    assert update.call_args.kwargs.keys() == taken


SGD = optax.sgd(0.1)
SAM = optax.contrib.sam(SGD, SGD)
# Optax asks the type of a transformation whether it takes extra arguments.
PLAIN_SAM = optax.GradientTransformation(*SAM)
PARAMS = np.arange(1, 9, dtype=np.float32) / 8


wrapped = pytest.mark.parametrize(
    "wrap",
    [lambda tx: optax.chain(optax.clip(1.0), tx), lambda tx: optax.MultiSteps(tx, 2)],
    ids=["chain", "MultiSteps"],
)


@wrapped
def test_value_decides_beside_an_optimizer_that_does_not_take_it(wrap):
    tx = ls.with_loss_scaling(wrap(PLAIN_SAM))
    state, step = tx.init(PARAMS), jax.jit(tx.update)
    without = step(PARAMS, state, PARAMS)
    assert_same_bits(step(PARAMS, state, PARAMS, value=3.0), without)
    assert not ls.was_applied(step(PARAMS, state, PARAMS, value=np.nan)[1])


@wrapped
def test_optimizer_that_refuses_a_value_refuses_it_in_a_wrapper(wrap):
    refusing = ls.with_loss_scaling(wrap(SAM))
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        refusing.update(PARAMS, refusing.init(PARAMS), PARAMS, value=3.0)


def loss_in(dtype, params, slope):
    """In float16, gradients overflow at a scale of 2**16 / ``slope``."""
    return jnp.sum(params.astype(dtype) * jnp.asarray(slope, dtype)).astype(FLOAT32)


@pytest.mark.parametrize("check_updates", [False, True], ids=["unchecked", "checked"])
def test_overflow_inside_the_optimizer_skips_the_step(around, check_updates):
    """The gradients given are finite, but those at SAM's other parameters are not."""
    sam = optax.contrib.sam(SGD, SGD, opaque_mode=True)
    tx = ls.with_loss_scaling(sam, check_updates=check_updates)

    @around
    def step(params, state):
        steep = ls.scale_backward(lambda p, _: loss_in(FLOAT16, p, 16.0), state)
        updates, state = tx.update(PARAMS, state, params, grad_fn=jax.grad(steep))
        return optax.apply_updates(params, updates), state

    params, state, scales = PARAMS, tx.init(PARAMS), []
    for _ in range(6):
        old = params, state.inner_state
        params, state = step(params, state)
        scales.append(int(np.log2(ls.get_loss_scale(state))))
        if not ls.was_applied(state):
            assert_same_bits((params, state.inner_state), old)
    assert scales == [14, 13, 12, 11, 11, 11]
    assert np.isfinite(params).all() and ls.was_applied(state)


SEARCH = optax.scale_by_backtracking_linesearch(9, store_grad=True)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("value_fn", optax.chain(SGD, SEARCH)),
        ("obj_fn", optax.contrib.sophia(0.1, update_interval=1)),
    ],
    ids=["line search", "sophia"],
)
def test_scale_backward_scales_a_loss_inside_the_optimizer(name, inner):
    """Of a loss whose gradients are too small for float16, it makes the same steps."""
    tx = ls.with_loss_scaling(inner)

    @functools.partial(jax.jit, static_argnums=0)
    def step(dtype, params, state):
        def fun(params):
            return 2.0**-26 * loss_in(dtype, params, params)

        value, grads = ls.value_and_grad(fun, state)(params)
        given = {name: ls.scale_backward(fun, state), "value": value}
        given |= {"grad": grads} if name == "value_fn" else {}
        updates, state = tx.update(grads, state, params, **given)
        return updates, state.inner_state

    results = [step(x, PARAMS, tx.init(PARAMS)) for x in (FLOAT16, FLOAT32)]
    assert np.any(results[0][0])
    assert_same_bits(*results)
