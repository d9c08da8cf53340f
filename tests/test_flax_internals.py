"""What only Flax and Haiku have: if a test fails, a release has moved it."""

import inspect
import sys

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import optax_lossscale as ls
from optax_lossscale._flax_internals import nnx_objects, running_model
from optax_lossscale._flax_internals.bound_methods import wraps
from optax_lossscale._flax_internals.float8_overwrites import with_finite_overwrites


class Counter(nnx.Module):
    def __init__(self):
        self.weight, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.array(0))

    def times(self, x):
        return x * self.weight


def test_changes_of_copies_reach_the_originals():
    counter = Counter()
    before = nnx_objects.contents(counter)
    with nnx_objects.changes_transferred():
        arrays = nnx_objects.as_arrays((counter, "text"))
        copy, text = nnx_objects.with_objects(arrays, copies=True)
        assert copy is not counter and text == "text"
        assert nnx_objects.is_same(counter, before)
        copy.calls[...] += 1
        changed = nnx_objects.as_arrays(((), [copy]))
        nnx_objects.with_objects(changed, copies=False)
    assert counter.calls[...] == 1 and not nnx_objects.is_same(counter, before)


def test_objects_are_leaves_that_are_updated_in_place():
    old, new = Counter(), Counter()
    new.calls[...] += 2
    assert list(nnx_objects.leaves_with_objects([old]).values()) == [old]
    assert nnx_objects.update_objects([old], [new]) == [old] and old.calls[...] == 2
    assert with_finite_overwrites(old) is old


def test_wrapped_method_stays_a_method_of_its_module():
    counter = Counter()
    wrapped = wraps(counter.times)(lambda x: counter.times(2 * x))
    assert wrapped.__self__ is counter and wrapped(3).tolist() == [6, 6]
    assert inspect.signature(wrapped) == inspect.signature(counter.times)
    assert not inspect.ismethod(wraps(jnp.sum)(lambda x: x))


def test_variables_hold_arrays():
    arrays = jax.tree.leaves(nnx_objects.unwrap(nnx.state(Counter())))
    assert [type(x) for x in arrays] == [type(jnp.ones(2))] * 2


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


def test_haiku_model_is_read_and_written_and_its_initialization_seen():
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
