"""NNX objects as trees of arrays: if a test fails, Flax has changed."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from optax_lossscale._flax_internals import float8_overwrites, nnx_objects


class Counter(nnx.Module):
    def __init__(self):
        self.weight, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.array(0))


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
