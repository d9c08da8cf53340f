"""A loss that is not scaled, not unscaled, or scaled twice is noticed at once."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ls
from optax_lossscale._usage import NOTED

PARAMS = jnp.ones(2)
TX = ls.with_loss_scaling(optax.sgd(0.1))


@pytest.fixture(autouse=True)
def new_process():
    """As if the package had just been imported."""
    before = set(NOTED)
    NOTED.clear()
    yield
    NOTED.update(before)


def loss_fn(params):
    return jnp.sum(params**2)


@pytest.mark.parametrize("jit", [True, False])
def test_the_first_update_whose_loss_is_not_scaled_is_warned_of_once(jit):
    def step(params, state):
        grads = jax.grad(loss_fn)(params)
        return TX.update(grads, state, params)[1]

    step = jax.jit(step) if jit else step
    with pytest.warns(UserWarning, match="^No loss has been scaled: .*ls.value_and_g"):
        state = step(PARAMS, TX.init(PARAMS))
    step(PARAMS, state)


def test_nothing_is_said_where_the_scale_is_1_or_has_been_read():
    for rule in (ls.FixedLossScale(1.0), ls.FixedLossScale(1.0, skip_nonfinite=False)):
        tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    state = TX.init(PARAMS)
    for read in (
        ls.get_loss_scale,
        lambda state: ls.value_and_grad(loss_fn, state)(PARAMS),
        lambda state: jax.grad(ls.scale_backward(loss_fn, state))(PARAMS),
        lambda state: jax.grad(ls.scale_backward(loss_fn, 8.0))(PARAMS),
        lambda state: ls.value_and_grad_with_retries(loss_fn, state)(PARAMS),
        lambda state: ls.unscale_grads(ls.scale_loss(PARAMS, state), state),
    ):
        NOTED.clear()
        read(state)
        TX.update(PARAMS, state, PARAMS)


def test_two_compiled_halves_of_a_step_are_fine():
    half = jax.jit(lambda params, state: ls.value_and_grad(loss_fn, state)(params)[1])
    state = TX.init(PARAMS)
    jax.jit(TX.update)(half(PARAMS, state), state, PARAMS)


def test_gradients_that_are_never_unscaled_are_warned_of():
    state = TX.init(PARAMS)
    grads = jax.grad(lambda p: ls.scale_loss(loss_fn(p), state))(PARAMS)
    with pytest.warns(UserWarning, match="^`scale_loss` has scaled .* `unscale_grads`"):
        TX.update(grads, state, PARAMS)


def test_a_loss_that_is_scaled_twice_is_warned_of():
    state = TX.init(PARAMS)
    scaled = ls.value_and_grad(lambda p: ls.scale_loss(loss_fn(p), state), state)
    with pytest.warns(UserWarning, match="^The loss is scaled twice"):
        scaled(PARAMS)

    def fails(params):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ls.value_and_grad(fails, state)(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ls.scale_loss(loss_fn(PARAMS), state)
