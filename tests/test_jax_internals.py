"""What depends on jax's internals says so when they are gone."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest
from helpers import EXPLICIT, make_mesh, on_mesh, set_mesh, without_keys
from jax.sharding import PartitionSpec as P

from optax_lossscale._jax_internals import (
    is_in_jit,
    is_staging,
    varying_axes,
    zeros_like_aval,
)

MESH = make_mesh(EXPLICIT, d=8)
SHARDED = jax.NamedSharding(MESH, P("d", None))


def test_varying_axes_are_those_along_which_devices_differ():
    def look(x, y):
        assert (varying_axes(x), varying_axes(y)) == ({"d"}, frozenset())
        return x

    mapped = on_mesh(look, (P("d"), P()), P("d"))
    jax.eval_shape(mapped, jnp.ones(8), jnp.ones(3))
    assert varying_axes(jnp.ones(8)) == frozenset()


def test_a_jax_that_reports_no_varying_axes_is_refused(monkeypatch):
    """An empty set would let devices decide differently."""
    monkeypatch.setattr(jax, "typeof", lambda x: types.SimpleNamespace(shape=()))
    with pytest.raises(RuntimeError, match="no longer reports .*earlier jax"):
        varying_axes(jnp.ones(()))


def test_staging_and_jit_are_seen_under_a_transfer_guard():
    with jax.transfer_guard("disallow"):
        assert not is_staging() and not is_in_jit()
    assert jax.jit(lambda: is_staging() and is_in_jit())()


@pytest.mark.parametrize(
    "x, mesh",
    [
        (jnp.ones((2, 3), jnp.float16), None),
        (jnp.int32(3), None),
        (jax.random.split(jax.random.key(0)), None),
        (jax.device_put(jnp.ones((8, 2)), SHARDED), MESH),
    ],
    ids=["float16", "int32", "keys", "sharded"],
)
def test_zeros_have_the_whole_type_of_an_array(x, mesh):
    def like(x):
        zeros = zeros_like_aval(jax.typeof(x))
        assert jax.typeof(zeros) == jax.typeof(x)
        return zeros

    with set_mesh(mesh) if mesh else contextlib.nullcontext():
        assert not without_keys(jax.jit(like)(x)).any()


def test_zeros_vary_along_the_mapped_axes_of_an_array():
    def like(x):
        zeros = zeros_like_aval(jax.typeof(x))
        assert varying_axes(zeros) == varying_axes(x) == {"d"}
        return zeros

    assert not on_mesh(like, P("d"), P("d"))(jnp.ones(8)).any()
