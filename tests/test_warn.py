"""A warning names the line of the user."""

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ls

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
