"""What an optimizer is given in the place of bad gradients and extra arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")


class Opened:
    """A node of a tree that wants arrays, whatever the tree is used for."""

    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(
    Opened, lambda node: ((node.x,), None), lambda _, xs: Opened(jnp.asarray(xs[0]))
)

GRADS = {"w": jnp.array([[1.0, 2.0, 3.0]]), "n": jnp.arange(2)}
BAD = {**GRADS, "w": GRADS["w"].at[0, 1].set(jnp.nan)}
NUMBERS = {
    "value": jnp.float32(3.0),
    "batch": (jnp.array([1.0, jnp.inf]), jnp.arange(3), Opened(jnp.float32(jnp.nan))),
}
PASSED_ON = {
    "array": np.array([1.0, np.nan]),
    "bound": float("inf"),
    "dtype": jnp.float32,
    "other dtype": np.dtype("float16"),
    "name": "text",
    "value_fn": len,
}


def given(grads, **extra_args):
    """The gradients and the extra arguments that reach the optimizer."""
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(grads=updates, **extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = ls.with_loss_scaling(inner)
    tx.update(grads, tx.init(grads), **extra_args)
    return seen.pop("grads"), seen


def test_an_applied_step_is_given_everything_as_it_is():
    grads, extra_args = given(GRADS, **NUMBERS)
    assert_same_bits(grads, GRADS)
    assert extra_args["batch"][0].tolist() == [1.0, np.inf]
    assert float(extra_args["value"]) == 3.0


@pytest.mark.parametrize("as_array", [jnp.asarray, np.asarray])
def test_a_skipped_step_is_given_finite_numbers(as_array):
    bad = jax.tree.map(as_array, BAD)
    grads, extra_args = given(bad, **NUMBERS)
    assert grads["n"] is bad["n"] and np.isfinite(grads["w"]).all()
    first, integers, node = extra_args["batch"]
    assert first[0] == 1.0  # it was finite
    assert integers is NUMBERS["batch"][1]
    assert np.isfinite([*first, node.x]).all()
    assert 1e37 < extra_args["value"] < np.inf  # any other is better


@pytest.mark.parametrize("grads", [GRADS, BAD], ids=["good", "bad"])
def test_what_is_no_array_of_a_device_is_passed_on(grads):
    _, extra_args = given(grads, **PASSED_ON)
    assert all(extra_args[name] is x for name, x in PASSED_ON.items())


def test_a_program_may_look_at_what_is_concrete_in_it():
    extra_args = {**PASSED_ON, "mask": jnp.array([0.0, 1.0]), "value": jnp.float32(2.0)}

    def update(updates, state, params=None, *, mask, bound, array, value, **rest):
        kept = np.flatnonzero(np.asarray(mask)), np.nansum(array), float(value)
        assert bound == np.inf and kept == ([1], 1.0, 2.0)
        assert rest == {name: PASSED_ON[name] for name in rest}
        return updates, state

    tx = ls.with_loss_scaling(
        optax.GradientTransformationExtraArgs(lambda params: (), update)
    )
    state = tx.init(BAD)
    assert_no_update(jax.jit(lambda g: tx.update(g, state, **extra_args)[0])(BAD)["w"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2", "complex64"])
def test_neither_the_numbers_nor_their_deviations_are_zero(dtype):
    """For the derivatives of norms and square roots."""
    shapes = [(), (1,), (2,), (7,), (3, 4), (2, 1, 5)]
    bad = [jnp.full(shape, jnp.nan, dtype) for shape in shapes]
    for x in jax.jit(lambda grads: given(grads)[0])(bad):
        assert x.dtype == dtype and x.shape == shapes.pop(0)
        x = np.asarray(x).astype(np.float16 if dtype != "complex64" else dtype)
        assert np.all(x != 0) and np.all(x * x * np.float16(1e-3) != 0)
        if x.ndim and x.shape[-1] > 1:
            assert np.all(x - x.mean(-1, keepdims=True) != 0)
