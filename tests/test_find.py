"""get_loss_scale and get_loss_scale_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ls

PARAMS = {"w": jnp.ones(2)}


def wrapped(scale=64.0):
    return ls.with_loss_scaling(optax.adam(1e-3), ls.FixedLossScale(scale))


@pytest.mark.parametrize(
    "tx",
    [
        wrapped(),
        optax.chain(optax.clip(1.0), wrapped()),
        optax.named_chain(("a", optax.clip(1.0)), ("b", wrapped())),
        optax.masked(wrapped(), {"w": True}),
        optax.inject_hyperparams(lambda lr: wrapped())(lr=0.1),
    ],
)
def test_the_scale_is_found_anywhere(tx):
    state = tx.init(PARAMS)
    assert float(ls.get_loss_scale(state)) == 64.0
    assert float(optax.tree.get(state, "loss_scale")) == 64.0
    assert float(ls.get_loss_scale({"step": 3, "opt": state})) == 64.0
    assert ls.get_loss_scale(state) is ls.get_loss_scale_state(state).loss_scale


def test_the_state_itself_will_do():
    state = ls.DynamicLossScale().init()
    assert ls.get_loss_scale_state(state) is state


def test_inside_jit():
    assert float(jax.jit(ls.get_loss_scale)(wrapped().init(PARAMS))) == 64.0


@pytest.mark.parametrize(
    "state, advice",
    [
        (optax.adam(1e-3).init(PARAMS), "wrapped with `with_loss_scaling`"),
        (wrapped(), r"It is the optimizer: pass what its `init\(params\)` returns"),
        (
            ls.DynamicLossScale(),
            r"It is not a state yet: pass what its `init\(\)` returns",
        ),
        ({}, "`with_loss_scaling`"),
        (None, "`with_loss_scaling`"),
        (128.0, "`with_loss_scaling`"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        ls.get_loss_scale,
        ls.get_loss_scale_state,
        lambda s: ls.value_and_grad(jnp.sum, s),
        lambda s: ls.grad(jnp.sum, s),
        lambda s: ls.scale_loss(1.0, s),
        lambda s: ls.unscale_grads(1.0, s),
    ],
)
def test_a_state_without_a_scale_is_refused(state, advice, use):
    message = f"`state` must contain a LossScaleState, got a .*{advice}"
    with pytest.raises(ValueError, match=message):
        use(state)


def test_a_state_with_two_scales_is_refused_with_their_paths():
    tx = optax.named_chain(("a", wrapped()), ("b", wrapped()))
    with pytest.raises(ValueError, match="only one LossScaleState, got 2") as error:
        ls.get_loss_scale(tx.init(PARAMS))
    assert "['a']" in str(error.value) and "['b']" in str(error.value)
    assert "wrap the whole optimizer once" in str(error.value)


@pytest.mark.parametrize(
    "number",
    [8.0, 8, np.float16(8), np.float64(8), jnp.int32(8), jnp.bfloat16(8)],
    ids=lambda x: type(x).__name__ + str(getattr(x, "dtype", "")),
)
def test_a_scale_of_any_type_is_read_as_float32(number):
    state = optax.tree.set(wrapped().init(PARAMS), loss_scale=number)
    scale = ls.get_loss_scale(state)
    assert (float(scale), scale.dtype, scale.weak_type) == (8.0, jnp.float32, False)
    assert float(ls.scale_loss(2.0, state)) == 16.0
    value, grads = ls.value_and_grad(lambda w: w**2, state)(3.0)
    assert (float(value), float(grads)) == (9.0, 6.0)


def test_a_state_without_numbers_can_be_read_and_not_used():
    state = jax.eval_shape(wrapped().init, PARAMS)
    assert ls.get_loss_scale(state).dtype == jnp.float32
    with pytest.raises(ValueError, match="`state` must hold numbers, got a jax.Shape"):
        ls.value_and_grad(jnp.sum, state)


def test_the_state_of_an_ensemble_can_be_read_and_not_used_as_one():
    state = jax.vmap(wrapped().init)({"w": jnp.ones((3, 2))})
    assert ls.get_loss_scale(state).shape == (3,)
    for use in (
        lambda: ls.value_and_grad(jnp.sum, state),
        lambda: ls.scale_loss(1.0, state),
        lambda: ls.unscale_grads(1.0, state),
        lambda: wrapped().update(PARAMS, state, PARAMS),
    ):
        with pytest.raises(ValueError, match="of one run, got .*inside `jax.vmap`"):
            use()
