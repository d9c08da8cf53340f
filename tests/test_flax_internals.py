"""What only Flax has: one canary for each use, which says what a release moved."""

import flax
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from asserts import assert_holds
from flax import nnx

from optax_lossscale import _flax_internals


class Counter(nnx.Module):
    def __init__(self):
        self.weight, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.array(0))


def changes_of_copies_reach_the_originals():
    counter = Counter()
    with _flax_internals.changes_transferred():
        arrays = _flax_internals.as_arrays((counter, "text"))
        copy, text = _flax_internals.with_objects(arrays, copies=True)
        assert copy is not counter and text == "text"
        copy.calls[...] += 1
        changed = _flax_internals.as_arrays(((), [copy]))
        _flax_internals.with_objects(changed, copies=False)
    return counter.calls[...] == 1


def objects_are_leaves_and_updated_in_place():
    old, new = Counter(), Counter()
    new.calls[...] += 2
    assert list(_flax_internals.leaves_with_objects([old]).values()) == [old]
    [updated] = _flax_internals.update_objects([old], [new])
    return updated is old and old.calls[...] == 2


def variables_hold_arrays():
    state = nnx.state(Counter())
    return all(
        isinstance(x, jax.Array) for x in jax.tree.leaves(_flax_internals.unwrap(state))
    )


def modules_that_change_are_known():
    with pytest.raises(TypeError, match=r"nnx\.value_and_grad"):
        _flax_internals.check_no_modules((), [Counter()])
    return True


def initialization_is_known():
    seen = []

    class Model(nn.Module):
        def __call__(self, x):
            seen.append(_flax_internals.is_initializing())
            return x

    model = Model()
    model.apply(model.init(jax.random.key(0), jnp.ones(2)), jnp.ones(2))
    return [*seen, _flax_internals.is_initializing()] == [True, False, False]


def state_of_a_running_model_is_read_and_written():
    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            calls = self.variable("counts", "calls", int)
            (variables, _) = _flax_internals.model_state()
            assert variables == {"counts": {"calls": 0}}
            _flax_internals.set_model_state(({"counts": {"calls": 1}}, None))
            return calls.value

    def draws():
        before = _flax_internals.model_state()
        first = hk.next_rng_key()
        _flax_internals.set_model_state(before)
        return first == hk.next_rng_key()

    calls, _ = Model().apply({"counts": {"calls": 0}}, mutable=["counts"])
    return calls == 1 and hk.transform(draws).apply({}, jax.random.key(0))


CANARIES = [
    initialization_is_known,
    state_of_a_running_model_is_read_and_written,
    changes_of_copies_reach_the_originals,
    objects_are_leaves_and_updated_in_place,
    variables_hold_arrays,
    modules_that_change_are_known,
]


@pytest.mark.parametrize("holds", CANARIES, ids=lambda x: x.__name__)
def test_a_private_part_of_flax_is_where_it_was(holds):
    assert_holds(
        holds, f"flax {flax.__version__} has moved it: mend `_flax_internals.py`"
    )
