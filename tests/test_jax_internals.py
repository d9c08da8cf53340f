"""What depends on jax's internals says so when they are gone."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh, set_mesh
from shared import slow_but
from training import make_step

import optax_lossscale as ls
from optax_lossscale import _jax_internals
from optax_lossscale._jax_internals import zeros_like_aval

W = jnp.ones((8, 2))
TX = ls.with_loss_scaling(optax.adam(0.1))
STEP = make_step(TX, lambda w, x: jnp.mean((x @ w - 1.0) ** 2))


@pytest.fixture(params=slow_but(["manual_axis_type"], ["manual_axis_type", "varying"]))
def renamed(monkeypatch, request):
    """A jax that calls the mapped axes of an array's type something else."""

    def get(x, name, *default):
        hidden = name in ("vma", request.param)
        return getattr(object() if hidden else x, name, *default)

    monkeypatch.setattr(_jax_internals, "getattr", get, raising=False)


@pytest.mark.parametrize("compile", [lambda step: step, jax.jit], ids=["eager", "jit"])
def test_a_jax_that_reports_no_varying_axes_trains_on_one_device(compile, renamed):
    w, state = compile(STEP)(W, TX.init(W), W.T)
    assert ls.was_applied(state) and jnp.all(w != W)


def test_a_jax_that_reports_no_varying_axes_trains_under_vmap(renamed):
    states = jax.vmap(TX.init)(jnp.stack([W, W]))
    batches = jnp.stack([W.T, W.T * jnp.nan])
    step = jax.vmap(STEP, axis_name="members")
    _, states = jax.jit(step)(jnp.stack([W, W]), states, batches)
    assert ls.get_loss_scale_state(states).skipped_steps.tolist() == [0, 1]


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_jax_that_reports_no_varying_axes_trains_sharded_arrays(axis_type, renamed):
    mesh = make_mesh(axis_type, d=2)
    x = jax.device_put(W, NamedSharding(mesh, P("d")))
    with set_mesh(mesh):
        step = jax.jit(make_step(TX, lambda w, x: jnp.mean((x * w - 1.1) ** 2)))
        _, state = step(W, TX.init(W), x)
    assert ls.was_applied(state)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_jax_that_reports_no_varying_axes_is_refused_under_shard_map(
    check_vma, renamed
):
    """An empty set would let devices decide differently."""
    mesh = make_mesh(d=2)
    step = on_mesh(STEP, (P(), P(), P("d")), P(), mesh, check_vma=check_vma)
    with pytest.raises(RuntimeError, match="no longer reports .*earlier jax"):
        step(W, TX.init(W), W.T)


def test_zeros_of_keys_are_keys():
    keys = jax.random.split(jax.random.key(0))
    zeros = jax.jit(lambda x: zeros_like_aval(jax.typeof(x)))(keys)
    assert zeros.dtype == keys.dtype and not jax.random.key_data(zeros).any()
