"""What only Flax has: one canary for each use, which says what a release moved."""

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from optax_lossscale import _flax


class Counter(nnx.Module):
    def __init__(self):
        self.weight, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.array(0))


def changes_of_copies_reach_the_originals():
    counter = Counter()
    with _flax.changes_transferred():
        arrays = _flax.as_arrays((counter, "text"))
        copy, text = _flax.with_objects(arrays, copies=True)
        assert copy is not counter and text == "text"
        copy.calls[...] += 1
        changed = _flax.as_arrays(((), [copy]))
        _flax.with_objects(changed, copies=False)
    return counter.calls[...] == 1


def objects_are_leaves_and_updated_in_place():
    old, new = Counter(), Counter()
    new.calls[...] += 2
    assert list(_flax.leaves_with_objects([old]).values()) == [old]
    [updated] = _flax.update_objects([old], [new])
    return updated is old and old.calls[...] == 2


def variables_hold_arrays():
    state = nnx.state(Counter())
    return all(isinstance(x, jax.Array) for x in jax.tree.leaves(_flax.unwrap(state)))


def modules_that_change_are_known():
    with pytest.raises(TypeError, match=r"nnx\.value_and_grad"):
        _flax.check_no_modules((), [Counter()])
    return True


CANARIES = [
    changes_of_copies_reach_the_originals,
    objects_are_leaves_and_updated_in_place,
    variables_hold_arrays,
    modules_that_change_are_known,
]


@pytest.mark.parametrize("holds", CANARIES, ids=lambda x: x.__name__)
def test_a_private_part_of_flax_is_where_it_was(holds):
    broken = f"flax {flax.__version__} has moved something: mend `_flax.py`"
    try:
        assert holds(), broken
    except Exception as error:
        pytest.fail(f"{broken}: {error!r}")
