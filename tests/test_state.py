"""LossScaleState: types, counters, names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import every_rule
from shared import enable_x64

import optax_lossscale as ls

TYPES = {
    "loss_scale": "float32",
    "growth_tracker": "int32",
    "hysteresis_tracker": "int32",
    "is_fixed": "bool",
    "skipped_steps": "int32",
    "consecutive_skips": "int32",
    "skip_rate": "float32",
}


@every_rule
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_fields_are_in_order_and_strongly_typed_scalars(rule, x64):
    with enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        states = [rule.init(), jax.eval_shape(rule.init)]
        measured = [0.5] * rule.uses_max_magnitude
        for flag in (True, jnp.bool_(True), np.bool_(False)):
            states.append(jax.eval_shape(rule.update, states[-1], flag, *measured))
    for state in states:
        *fields, _ = state._asdict().items()
        assert [(name, x.dtype.name) for name, x in fields] == [*TYPES.items()]
        leaves = jax.tree.leaves(state)
        assert {(x.shape, x.weak_type) for x in leaves} == {((), False)}
        assert {x.dtype.name for x in leaves[len(TYPES) :]} <= {"float32", "int32"}
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(states[0]))


def test_field_names_are_unique_among_optax_states():
    """Otherwise ``optax.tree.get`` finds two of them in a chain, and raises."""
    taken = {
        field
        for module in (optax, optax.contrib, optax.transforms)
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, tuple)
        for field in getattr(cls, "_fields", ())
    }
    assert "count" in taken, "meta-test: the fields of optax's states are found"
    ours = ls.LossScaleState, ls.WithLossScalingState, ls.MasterWeightsState
    names = {name for state in ours for name in state._fields} - {"inner_state"}
    assert taken.isdisjoint(names)


def test_created_state_counts_from_0():
    assert [*map(float, ls.LossScaleState.create(8.0)[:-1])] == [8, 0, 1, 0, 0, 0, 0]


def test_state_counts_all_skipped_steps_and_consecutive_ones():
    states, record = [ls.LossScaleState.create(8.0)], jax.jit(ls.LossScaleState.record)
    for applied in (False, False, True, False):
        states.append(record(states[-1], applied))
    assert [int(x.skipped_steps) for x in states] == [0, 1, 2, 2, 3]
    assert [int(x.consecutive_skips) for x in states] == [0, 1, 2, 0, 1]
