"""What depends on jax's internals says so when they are gone."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import make_step

import optax_lossscale as ls
from optax_lossscale import _jax_internals

W = jnp.ones((8, 2))
TX = ls.with_loss_scaling(optax.adam(0.1))
STEP = make_step(TX, lambda w, x: jnp.mean((x @ w - 1.0) ** 2))


@pytest.fixture
def renamed(monkeypatch):
    """A jax that calls the mapped axes of an array's type something else."""

    def get(x, name, *default):
        hidden = name in ("vma", "manual_axis_type")
        return getattr(object() if hidden else x, name, *default)

    monkeypatch.setattr(_jax_internals, "getattr", get, raising=False)


def test_a_jax_that_reports_no_varying_axes_trains_on_one_device(renamed):
    w, state = jax.jit(STEP)(W, TX.init(W), W.T)
    assert ls.was_applied(state) and jnp.all(w != W)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_jax_that_reports_no_varying_axes_is_refused_under_shard_map(
    check_vma, renamed
):
    """An empty set would let devices decide differently."""
    mesh = make_mesh(d=2)
    step = on_mesh(STEP, (P(), P(), P("d")), P(), mesh, check_vma=check_vma)
    with pytest.raises(RuntimeError, match="no longer reports .*earlier jax"):
        step(W, TX.init(W), W.T)
