"""The line that a warning names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ls

STATE = ls.DynamicLossScale().init()


def half_loss(w):
    return jnp.sum(w.astype(jnp.float16))  # a float16 loss is warned of


def by_function(w):
    return ls.grad(half_loss, STATE)(w)


def by_retries(w):
    return ls.value_and_grad_with_retries(half_loss, STATE)(w)[1]


def by_hand(w):
    return ls.scale_loss(half_loss(w), STATE)


def eager(step):
    return lambda w: step(w)


@pytest.mark.parametrize("around", [eager, jax.jit, jax.vmap])
@pytest.mark.parametrize("step", [by_function, by_retries, by_hand])
def test_warning_names_the_line_of_the_user_however_it_is_called(step, around):
    with pytest.warns(UserWarning, match="The loss is float16") as warned:
        jax.eval_shape(around(step), np.ones((2, 2), np.float32))
    [warning] = [w for w in warned if "float16" in str(w.message)]
    line = step.__code__.co_firstlineno + 1
    assert (warning.filename, warning.lineno) == (__file__, line)


def test_code_without_a_module_name_is_warned_of():
    names = {"ls": ls, "loss": np.float16(1), "state": STATE}
    with pytest.warns(UserWarning, match="The loss is float16"):
        exec("ls.scale_loss(loss, state)", names)
