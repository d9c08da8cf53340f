"""The state of a running model: if a test fails, Flax or Haiku has changed."""

import sys

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp

import optax_lossscale as ls
from optax_lossscale._flax_internals import running_model


class Model(nn.Module):
    @nn.compact
    def __call__(self):
        calls = self.variable("counts", "calls", int)
        (variables, _) = running_model.model_state()
        assert variables == {"counts": {"calls": calls.value}}
        running_model.set_model_state(({"counts": {"calls": 3}}, None))
        return calls.value, running_model.is_initializing()


def test_state_of_a_linen_model_is_read_and_written():
    assert Model().init_with_output({})[0] == (3, True)
    variables = {"counts": {"calls": 1}}
    assert Model().apply(variables, mutable=["counts"])[0] == (3, False)
    assert not running_model.is_initializing()


def test_keys_of_a_haiku_model_are_read_and_written():
    seen = []

    def draws():
        seen.append(running_model.is_initializing())
        before = running_model.model_state()
        first = hk.next_rng_key()
        running_model.set_model_state(before)
        return first == hk.next_rng_key()

    model, key = hk.transform(draws), jax.random.key(0)
    assert model.apply(model.init(key), key) and seen == [True, False]


def test_programs_without_flax_and_haiku_are_as_good(monkeypatch):
    for name in ("flax.nnx", "flax.linen", "haiku"):
        monkeypatch.delitem(sys.modules, name)
    state, loss_fn = ls.FixedLossScale().init(), ls.autocast(lambda x: x @ x)
    _, grads, _ = ls.value_and_grad_with_retries(loss_fn, state)(jnp.ones(2))
    assert grads.tolist() == [2, 2]
