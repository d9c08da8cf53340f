"""What stands in for gradients and extra arguments in a skipped step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls
from optax_lossscale._transform.sanitized import sanitized, split


class Opened:
    """A node of a tree that wants arrays, whatever the tree is used for."""

    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(
    Opened, lambda node: ((node.x,), None), lambda _, xs: Opened(jnp.asarray(xs[0]))
)

GRADS = {"w": jnp.array([[1.0, jnp.nan, 3.0]]), "n": jnp.arange(2)}
NUMBERS = {
    "value": jnp.float32(3.0),
    "batch": (jnp.array([1.0, jnp.inf]), jnp.arange(3), Opened(jnp.float32(jnp.nan))),
}
STATIC = {
    "array": np.array([1.0, np.nan]),
    "bound": float("inf"),
    "dtype": jnp.float32,
    "other dtype": np.dtype("float16"),
    "name": "text",
    "value_fn": len,
}


def given_where(apply, differentiated=False, extra_args=NUMBERS):
    given, put_back = split(GRADS, extra_args)
    return put_back(sanitized(jnp.array(apply), given, differentiated))


def test_a_step_that_is_applied_is_given_everything_as_it_is():
    grads, extra_args = given_where(True)
    assert_same_bits(grads, GRADS)
    assert extra_args["batch"][0].tolist() == [1.0, np.inf]
    assert float(extra_args["value"]) == 3.0


@pytest.mark.parametrize("apply", [True, False])
def test_what_is_on_the_host_is_passed_on(apply):
    _, extra_args = given_where(apply, extra_args=STATIC)
    assert all(extra_args[name] is x for name, x in STATIC.items())


def test_a_program_may_look_at_what_is_concrete_in_it():
    given = {**STATIC, "mask": jnp.array([0.0, 1.0]), "value": jnp.float32(2.0)}

    def update(updates, state, params=None, *, mask, bound, array, value, **rest):
        kept = np.flatnonzero(np.asarray(mask)), np.nansum(array), float(value)
        assert bound == np.inf and kept == ([1], 1.0, 2.0)
        assert rest == {name: STATIC[name] for name in rest}
        return updates, state

    tx = ls.with_loss_scaling(
        optax.GradientTransformationExtraArgs(lambda params: (), update)
    )
    state = tx.init(GRADS)
    assert_no_update(jax.jit(lambda g: tx.update(g, state, **given)[0])(GRADS)["w"])


@pytest.mark.parametrize("differentiated", [True, False])
def test_a_step_that_is_skipped_is_given_finite_numbers(differentiated):
    grads, extra_args = given_where(False, differentiated)
    assert grads["n"] is GRADS["n"]
    assert np.all((grads["w"] != 0) == differentiated)
    first, integers, node = extra_args["batch"]
    assert first[0] == 1.0  # it was finite
    assert integers is NUMBERS["batch"][1]
    assert np.isfinite([*first, node.x]).all()
    assert 1e37 < extra_args["value"] < np.inf  # any other is better


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize(
    "shape",
    [
        *((), (7,), (2, 1, 5)),
        *(pytest.param(s, marks=pytest.mark.slow) for s in ((1,), (2,), (3, 4))),
    ],
    ids=str,
)
def test_where_a_derivative_is_taken_neither_they_nor_their_deviations_are_zero(
    shape, dtype
):
    given, _ = split(jnp.full(shape, jnp.nan, dtype), {})
    [x] = sanitized(jnp.array(False), given, True).grads
    assert x.dtype == dtype and x.shape == shape
    x = x.astype(np.float16 if dtype != "complex64" else dtype)
    assert np.all(x != 0) and np.all(x * x * np.float16(1e-3) != 0)
    if shape and shape[-1] > 1:
        assert np.all(x - x.mean(-1, keepdims=True) != 0)


def test_they_are_sharded_as_the_gradients_are():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with set_mesh(mesh):
        grads = jax.device_put(jnp.ones((8, 6)), NamedSharding(mesh, P("a", "b")))
        given, _ = split(grads, {})
        apply = jnp.array(False)
        sane = jax.jit(lambda given: sanitized(apply, given, True))(given)
    assert sane.grads[0].sharding.spec == P("a", "b")
