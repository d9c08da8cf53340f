"""What only Flax and Haiku have: if a test fails, a release has moved it.

Mend `_flax_internals.py`.
"""

import sys

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import optax_lossscale as ls
from optax_lossscale import _flax_internals as internals


class Counter(nnx.Module):
    def __init__(self):
        self.weight, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.array(0))


def test_changes_of_copies_reach_the_originals():
    counter = Counter()
    before = internals.contents(counter)
    with internals.changes_transferred():
        arrays = internals.as_arrays((counter, "text"))
        copy, text = internals.with_objects(arrays, copies=True)
        assert copy is not counter and text == "text"
        assert internals.is_same(counter, before)
        copy.calls[...] += 1
        changed = internals.as_arrays(((), [copy]))
        internals.with_objects(changed, copies=False)
    assert counter.calls[...] == 1 and not internals.is_same(counter, before)


def test_objects_are_leaves_that_are_updated_in_place():
    old, new = Counter(), Counter()
    new.calls[...] += 2
    assert list(internals.leaves_with_objects([old]).values()) == [old]
    assert internals.update_objects([old], [new]) == [old] and old.calls[...] == 2
    assert internals.with_finite_overwrites(old) is old


def test_overwrite_that_is_not_finite_keeps_the_old_value():
    """That of a parameter is a gradient, and stays NaN."""
    name, old, new = "_overwrite_with_gradient", [1.0, 2.0], [jnp.nan, 5.0]
    old, new = ({name: x, "w": x} for x in map(jnp.array, (old, new)))
    [grads] = jax.vjp(internals.with_finite_overwrites, old)[1](new)
    assert grads[name].tolist() == [1, 5]
    assert jnp.isnan(grads["w"]).tolist() == [True, False]


def test_variables_hold_arrays():
    arrays = jax.tree.leaves(internals.unwrap(nnx.state(Counter())))
    assert [type(x) for x in arrays] == [type(jnp.ones(2))] * 2


def test_module_that_changes_is_refused():
    with pytest.raises(TypeError, match=r"nnx\.value_and_grad"):
        internals.check_no_modules((), [Counter()])


class Model(nn.Module):
    @nn.compact
    def __call__(self):
        calls = self.variable("counts", "calls", int)
        (variables, _) = internals.model_state()
        assert variables == {"counts": {"calls": calls.value}}
        internals.set_model_state(({"counts": {"calls": 3}}, None))
        return calls.value, internals.is_initializing()


def test_state_of_a_linen_model_is_read_and_written():
    assert Model().init_with_output({})[0] == (3, True)
    variables = {"counts": {"calls": 1}}
    assert Model().apply(variables, mutable=["counts"])[0] == (3, False)
    assert not internals.is_initializing()


def test_keys_of_a_haiku_model_are_read_and_written():
    seen = []

    def draws():
        seen.append(internals.is_initializing())
        before = internals.model_state()
        first = hk.next_rng_key()
        internals.set_model_state(before)
        return first == hk.next_rng_key()

    model, key = hk.transform(draws), jax.random.key(0)
    assert model.apply(model.init(key), key) and seen == [True, False]


def test_programs_without_flax_and_haiku_are_as_good(monkeypatch):
    for name in ("flax.nnx", "flax.linen", "haiku"):
        monkeypatch.delitem(sys.modules, name)
    state, loss_fn = ls.FixedLossScale().init(), ls.autocast(lambda x: x @ x)
    _, grads, _ = ls.value_and_grad_with_retries(loss_fn, state)(jnp.ones(2))
    assert grads.tolist() == [2, 2]
