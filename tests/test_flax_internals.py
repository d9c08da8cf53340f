"""What only Flax has: if a test fails, a release has moved it.

What it shares with Haiku, programs/test_traced_call.py runs.
"""

import inspect
import sys

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

import optax_lossscale as ls
from optax_lossscale._flax_internals import running_model
from optax_lossscale._flax_internals.bound_methods import wraps


class Scale(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))

    def times(self, x):
        return x * self.weight


def test_wrapped_method_stays_a_method_of_its_module():
    module = Scale()
    wrapped = wraps(module.times)(lambda x: module.times(2 * x))
    assert wrapped.__self__ is module and wrapped(3).tolist() == [6, 6]
    assert inspect.signature(wrapped) == inspect.signature(module.times)
    assert not inspect.ismethod(wraps(jnp.sum)(lambda x: x))


class Model(nn.Module):
    @nn.compact
    def __call__(self):
        calls = self.variable("counts", "calls", int)
        (variables, _) = running_model.model_state()
        assert variables == {"counts": {"calls": calls.value}}
        running_model.set_model_state(({"counts": {"calls": 3}}, None))
        return calls.value, running_model.is_initializing()


def test_linen_model_is_read_and_written_and_its_initialization_seen():
    assert Model().init_with_output({})[0] == (3, True)
    variables = {"counts": {"calls": 1}}
    assert Model().apply(variables, mutable=["counts"])[0] == (3, False)
    assert not running_model.is_initializing()


def test_autocast_and_retries_work_without_flax_and_haiku(monkeypatch):
    for name in ("flax.nnx", "flax.linen", "haiku"):
        monkeypatch.setitem(sys.modules, name, None)
    state, loss_fn = ls.FixedLossScale().init(), ls.autocast(lambda x: x @ x, "float16")
    _, grads, _ = ls.value_and_grad_with_retries(loss_fn, state)(jnp.ones(2))
    assert grads.tolist() == [2, 2]
