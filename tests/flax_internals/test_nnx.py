"""What only Flax NNX has: if a test fails, Flax has changed."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from optax_lossscale._flax_internals import float8_overwrites, nnx_objects
from optax_lossscale._flax_internals.bound_methods import wraps


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
    assert float8_overwrites.with_finite_overwrites(old) is old


def test_variables_hold_arrays():
    arrays = jax.tree.leaves(nnx_objects.unwrap(nnx.state(Counter())))
    assert [type(x) for x in arrays] == [type(jnp.ones(2))] * 2


def test_module_that_changes_is_refused():
    with pytest.raises(TypeError, match=r"nnx\.value_and_grad"):
        nnx_objects.check_no_modules((), [Counter()])


def test_wrapped_method_stays_a_method_of_its_module():
    counter = Counter()
    method = functools.partial(counter.times)
    wrapped = wraps(method)(lambda x: method(2 * x))
    assert wrapped.__self__ is counter and wrapped(3).tolist() == [6, 6]
    assert inspect.signature(wrapped) == inspect.signature(counter.times)
    assert not inspect.ismethod(wraps(jnp.sum)(lambda x: x))


def test_overwrite_that_is_not_finite_keeps_the_old_value():
    """That of a parameter is a gradient, and stays NaN."""
    name, old, new = "_overwrite_with_gradient", [1.0, 2.0], [jnp.nan, 5.0]
    old, new = ({name: x, "w": x} for x in map(jnp.array, (old, new)))
    [grads] = jax.vjp(float8_overwrites.with_finite_overwrites, old)[1](new)
    assert grads[name].tolist() == [1, 5]
    assert jnp.isnan(grads["w"]).tolist() == [True, False]
