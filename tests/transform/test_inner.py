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

import optax_lossscale as ls

pytestmark = [
    pytest.mark.filterwarnings("ignore:. of . parameters are float16"),
    pytest.mark.filterwarnings("ignore:The true gradients are float16"),
]


def of(dtype):
    tree = {"w": np.linspace(-1, 1, 8), "b": 1.0}
    return jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), tree))


FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = "float32", "float16", "bfloat16", "float8_e5m2"
ADAM, ADAM_BFLOAT16 = optax.adam(5e-3), optax.adam(1e-3, mu_dtype=jnp.bfloat16)
# Whose branches return one type.
BRANCHES = optax.apply_if_finite(
    optax.conditionally_transform(ADAM, lambda step, **kwargs: step < 1), 3
)


@pytest.mark.parametrize("rule", [ls.DynamicLossScale(), ls.FixedLossScale(1.0)])
@pytest.mark.parametrize(
    ("inner", "params", "grads", "moments", "updates"),
    [
        (ADAM, FLOAT32, FLOAT32, (FLOAT32, FLOAT32), FLOAT32),
        (ADAM, FLOAT32, FLOAT16, (FLOAT32, FLOAT32), FLOAT32),
        (ADAM, FLOAT16, FLOAT16, (FLOAT32, FLOAT32), FLOAT16),
        (ADAM, FLOAT16, FLOAT32, (FLOAT32, FLOAT32), FLOAT32),
        (ADAM, FLOAT8, FLOAT32, (FLOAT32, FLOAT32), FLOAT32),
        (ADAM, BFLOAT16, BFLOAT16, (BFLOAT16, BFLOAT16), BFLOAT16),
        (ADAM_BFLOAT16, FLOAT16, FLOAT16, (BFLOAT16, FLOAT32), FLOAT16),
        (BRANCHES, FLOAT16, FLOAT16, (FLOAT32, FLOAT32), FLOAT16),
        (BRANCHES, FLOAT16, FLOAT32, (FLOAT32, FLOAT32), FLOAT32),
    ],
)
def test_moments_and_updates_have_types(inner, params, grads, moments, updates, rule):
    """Moments are as wide as of float32 parameters, and updates like gradients."""
    tx, params = ls.with_loss_scaling(inner, rule), of(params)
    state = tx.init(params)
    found = (optax.tree.get(state, name)["w"].dtype.name for name in ("mu", "nu"))
    assert (*found,) == moments
    # A state of another precision, such as a restored one, keeps it.
    restored = state._replace(inner_state=inner.init(params))
    for old in (state, *[restored] * (grads == str(params["w"].dtype))):
        actual, new_state = jax.eval_shape(tx.update, of(grads), old, params)
        assert_same_types(actual, of(updates))
        assert_same_types(new_state, old)


def test_narrow_gradients_are_squared_in_float32():
    tx, params = ls.with_loss_scaling(ADAM), np.ones(8, np.float32)
    updates, _ = tx.update(np.float16(1e-4) * params, tx.init(params), params)
    np.testing.assert_allclose(updates, -5e-3 * params, rtol=1e-3)


class WeakRule(ls.LossScale):
    """A rule whose numbers have other types than the first ones."""

    def init(self):
        return ls.LossScaleState.create(8.0)

    def update(self, state, grads_finite):
        state = state.record(grads_finite)
        return state._replace(growth_tracker=0, loss_scale=jnp.asarray(4.0))


WEAK = optax.GradientTransformation(
    lambda p: {"rate": jnp.asarray(0.3), "step": 0, "full": jnp.full(4, 0.3)},
    lambda u, s, p=None: (u, {**s, "step": s["step"] * 1, "rate": jnp.asarray(0.3)}),
)
NEVER_SKIPS = ls.FixedLossScale(4.0, skip_nonfinite=False)


@pytest.mark.parametrize("rule", [ls.DynamicLossScale(16.0), NEVER_SKIPS, WeakRule()])
def test_types_of_the_state_never_change(rule, around):
    """So one program serves a run. Of Optax's optimizers `test_optimizers` says so."""
    tx, params = ls.with_loss_scaling(WEAK, rule), of(FLOAT16)
    state, update = tx.init(params), around(tx.update)
    for bad in (1, np.nan, np.inf):
        grads = {name: x * np.float32(bad) for name, x in of(FLOAT32).items()}
        _, new_state = update(grads, state, params)
        assert_same_types(new_state, state)
        state = new_state
    assert float(ls.get_loss_scale(state)) == 4.0


@pytest.mark.parametrize("check_updates", [False, True])
def test_non_array_leaves_pass_through(check_updates, around):
    """Such as the functions of an Equinox module, and names."""
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    inner = optax.GradientTransformation(
        lambda params: ("name", model, np.zeros(2, np.float32)),
        lambda updates, state, params=None: (updates, (*state[:2], state[2] + updates)),
    )
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    update = eqx.filter_jit(tx.update) if around is jax.jit else tx.update
    for number, expected in ((1.0, 1.0), (np.nan, 0.0)):
        grads = np.full(2, number, np.float32)
        name, kept, total = update(grads, tx.init(grads))[1].inner_state
        assert name == "name" and total.tolist() == [expected] * 2
        assert eqx.tree_equal(kept, model)


ALL = {"grads_finite", "value", "value_fn"}


@pytest.mark.parametrize(
    ("signature", "taken"),
    [
        # The flag is meant for us: a line search would hand it to the loss.
        (lambda g, s, p=None, **others: (g, s), ALL - {"grads_finite"}),
        (lambda g, s, p=None, value=None: (g, s), {"value"}),
        (lambda g, s, p=None, *, grads_finite, **others: (g, s), ALL),
    ],
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
PLAIN_SAM = optax.GradientTransformation(*SAM)


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: optax.chain(optax.clip(1.0), tx), lambda tx: optax.MultiSteps(tx, 2)],
    ids=["chain", "MultiSteps"],
)
def test_value_decides_beside_an_optimizer_without_it(wrap, around):
    tx, params = ls.with_loss_scaling(wrap(PLAIN_SAM)), of(FLOAT32)
    state, step = tx.init(params), around(tx.update)
    without = step(params, state, params)
    assert_same_bits(step(params, state, params, value=3.0), without)
    assert not ls.was_applied(step(params, state, params, value=jnp.nan)[1])
    refusing = ls.with_loss_scaling(wrap(SAM))
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        refusing.update(params, refusing.init(params), params, value=3.0)


def loss_in(dtype, params, steepness=1.0):
    """In float16, gradients overflow at a scale of 2**16 / ``steepness``."""
    leaves = [x.astype(dtype) for x in jax.tree.leaves(params)]
    total = sum(jnp.sum(x * jnp.asarray(steepness, dtype)) for x in leaves)
    return total.astype(jnp.float32)


@pytest.mark.parametrize("check_updates", [False, True])
def test_overflow_inside_the_optimizer_skips_the_step(around, check_updates):
    """The gradients given are finite, but those at SAM's other parameters are not."""
    sam = optax.contrib.sam(SGD, SGD, opaque_mode=True)
    tx = ls.with_loss_scaling(sam, check_updates=check_updates)
    grads = params = of(FLOAT32)

    def step(params, state):
        steep = ls.scale_backward(lambda p, _: loss_in(FLOAT16, p, 16.0), state)
        updates, state = tx.update(grads, state, params, grad_fn=jax.grad(steep))
        return optax.apply_updates(params, updates), state

    step, state, scales = around(step), tx.init(params), []
    for _ in range(6):
        old = params, state.inner_state
        params, state = step(params, state)
        scales.append(int(np.log2(ls.get_loss_scale(state))))
        if not ls.was_applied(state):
            assert_same_bits((params, state.inner_state), old)
    assert scales == [14, 13, 12, 11, 11, 11]
    assert ls.all_finite((params, state.inner_state)) and ls.was_applied(state)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("value_fn", optax.lbfgs()),
        ("obj_fn", optax.contrib.sophia(0.1, update_interval=1)),
    ],
)
def test_scale_backward_scales_a_loss_inside_the_optimizer(name, inner):
    """Of a loss whose gradients are too small for float16, it makes the same steps."""
    tx, params = ls.with_loss_scaling(inner), of(FLOAT32)

    @functools.partial(jax.jit, static_argnums=0)
    def step(dtype, params, state):
        def fun(params):
            return 2.0**-30 * loss_in(dtype, params)

        value, grads = ls.value_and_grad(fun, state)(params)
        given = {name: ls.scale_backward(fun, state), "value": value}
        given |= {"grad": grads} if name == "value_fn" else {}
        return tx.update(grads, state, params, **given)[0]

    results = [step(x, params, tx.init(params)) for x in (FLOAT16, FLOAT32)]
    assert all(map(np.any, jax.tree.leaves(jax.device_get(results))))
    assert_same_bits(*results)
