"""get_loss_scale and get_loss_scale_state."""

import jax
import jax.numpy as jnp
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
    "state",
    [
        optax.adam(1e-3).init(PARAMS),
        wrapped(),
        ls.DynamicLossScale(),
        {},
        None,
        128.0,
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
def test_a_state_without_a_scale_is_refused(state, use):
    message = "`state` must contain a LossScaleState, got a .* `with_loss_scaling`"
    with pytest.raises(ValueError, match=message):
        use(state)


def test_a_state_with_two_scales_is_refused_with_their_paths():
    tx = optax.named_chain(("a", wrapped()), ("b", wrapped()))
    with pytest.raises(ValueError, match="only one LossScaleState, got 2") as error:
        ls.get_loss_scale(tx.init(PARAMS))
    assert "['a']" in str(error.value) and "['b']" in str(error.value)
    assert "wrap the whole optimizer once" in str(error.value)
