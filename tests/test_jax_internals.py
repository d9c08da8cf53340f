"""What depends on jax's internals says so when they are gone."""

import types

import jax
import jax.numpy as jnp
import pytest

from optax_lossscale._jax_internals import varying_axes, zeros_like_aval


def test_a_jax_that_reports_no_varying_axes_is_refused(monkeypatch):
    """An empty set would let devices decide differently."""
    monkeypatch.setattr(jax, "typeof", lambda x: types.SimpleNamespace(shape=()))
    with pytest.raises(RuntimeError, match="no longer reports .*earlier jax"):
        varying_axes(jnp.ones(()))


def test_zeros_of_keys_are_keys():
    keys = jax.random.split(jax.random.key(0))
    zeros = jax.jit(lambda x: zeros_like_aval(jax.typeof(x)))(keys)
    assert zeros.dtype == keys.dtype and not jax.random.key_data(zeros).any()
