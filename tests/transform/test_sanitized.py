"""What stands in for gradients and extra arguments in a skipped step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_lossscale._transform.sanitized import sanitized, split

GRADS = {"w": jnp.array([[1.0, jnp.nan, 3.0]]), "n": jnp.arange(2)}
EXTRA = {
    "value": jnp.float32(3.0),
    "batch": (jnp.array([1.0, jnp.inf]), np.array([1.0, 2.0]), "text"),
    "number": 4.0,
    "value_fn": len,
    "nothing": None,
}


def given_where(apply, differentiated=False, extra_args=EXTRA):
    given, put_back = split(GRADS, extra_args)
    return put_back(sanitized(jnp.array(apply), given, differentiated))


def test_a_step_that_is_applied_is_given_everything_as_it_is():
    grads, extra_args = given_where(True)
    assert_same_bits(grads, GRADS)
    assert extra_args["batch"][0].tolist() == [1.0, np.inf]
    assert float(extra_args["value"]) == 3.0


@pytest.mark.parametrize("apply", [True, False])
def test_what_is_no_array_or_finite_on_the_host_is_passed_on(apply):
    _, extra_args = given_where(apply)
    assert extra_args.keys() == EXTRA.keys()
    assert extra_args["batch"][1] is EXTRA["batch"][1]
    assert extra_args["batch"][2] == "text"
    for name in ("number", "value_fn", "nothing"):
        assert extra_args[name] is EXTRA[name]


@pytest.mark.parametrize("differentiated", [True, False])
def test_a_step_that_is_skipped_is_given_finite_numbers(differentiated):
    bad = {**EXTRA, "value": np.nan, "number": np.float32(np.inf)}
    for given in (bad, EXTRA):
        grads, extra_args = given_where(False, differentiated, given)
        assert grads["n"] is GRADS["n"]
        assert np.all((grads["w"] != 0) == differentiated)
        assert extra_args["batch"][0][0] == 1.0  # it was finite
        assert np.isfinite(extra_args["batch"][0]).all()
        assert np.isfinite(extra_args["number"])
        assert 1e37 < extra_args["value"] < np.inf  # any other is better


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (7,), (3, 4), (2, 1, 5)], ids=str)
def test_where_a_derivative_is_taken_neither_they_nor_their_deviations_are_zero(
    shape, dtype
):
    given, _ = split(jnp.full(shape, jnp.nan, dtype), {})
    x = sanitized(jnp.array(False), given, True).grads
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
    assert sane.grads.sharding.spec == P("a", "b")
