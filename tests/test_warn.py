"""Warnings: the line they name, and a loss that is not scaled, or scaled twice."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ls
from optax_lossscale._warn import NOTED

STATE = ls.DynamicLossScale().init()


def loss_fn(w):
    return jnp.sum(w.astype(jnp.float16))  # a float16 loss is warned of


def by_hand(w):
    return ls.grad(loss_fn, STATE)(w)


@pytest.mark.parametrize("step", [by_hand, jax.jit(by_hand), jax.vmap(by_hand)])
@pytest.mark.filterwarnings("ignore:The loss scale, 32768, is a constant")
def test_a_warning_names_the_line_of_the_user_however_it_is_called(step):
    with pytest.warns(UserWarning, match="The loss is float16") as warned:
        step(jnp.ones((2, 2)))
    [warning] = [w for w in warned if "float16" in str(w.message)]
    assert warning.filename == __file__
    assert warning.lineno == by_hand.__code__.co_firstlineno + 1


PARAMS = jnp.ones(2)
TX = ls.with_loss_scaling(optax.sgd(0.1))


@pytest.fixture(autouse=True)
def new_process():
    """As if the package had just been imported."""
    before = set(NOTED)
    NOTED.clear()
    yield
    NOTED.update(before)


def squares(params):
    return jnp.sum(params**2)


@pytest.mark.parametrize("jit", [True, False])
def test_the_first_update_whose_loss_is_not_scaled_is_warned_of_once(jit):
    def step(params, state):
        grads = jax.grad(squares)(params)
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
        lambda state: ls.value_and_grad(squares, state)(PARAMS),
        lambda state: jax.grad(ls.scale_backward(squares, state))(PARAMS),
        lambda state: jax.grad(ls.scale_backward(squares, 8.0))(PARAMS),
        lambda state: ls.value_and_grad_with_retries(squares, state)(PARAMS),
        lambda state: ls.unscale_grads(ls.scale_loss(PARAMS, state), state),
    ):
        NOTED.clear()
        read(state)
        TX.update(PARAMS, state, PARAMS)


def test_two_compiled_halves_of_a_step_are_fine():
    half = jax.jit(lambda params, state: ls.value_and_grad(squares, state)(params)[1])
    state = TX.init(PARAMS)
    jax.jit(TX.update)(half(PARAMS, state), state, PARAMS)


def test_gradients_that_are_never_unscaled_are_warned_of():
    state = TX.init(PARAMS)
    grads = jax.grad(lambda p: ls.scale_loss(squares(p), state))(PARAMS)
    with pytest.warns(UserWarning, match="^`scale_loss` has scaled .* `unscale_grads`"):
        TX.update(grads, state, PARAMS)


def test_a_loss_that_is_scaled_twice_is_warned_of():
    state = TX.init(PARAMS)
    scaled = ls.value_and_grad(lambda p: ls.scale_loss(squares(p), state), state)
    with pytest.warns(UserWarning, match="^The loss is scaled twice"):
        scaled(PARAMS)

    def fails(params):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ls.value_and_grad(fails, state)(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ls.scale_loss(squares(PARAMS), state)
