"""LossScaleState: types, counters, names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import every_rule
from shared import enable_x64
from training import run_rule

import optax_lossscale as ls

TYPES = {
    "loss_scale": jnp.float32,
    "growth_tracker": jnp.int32,
    "hysteresis_tracker": jnp.int32,
    "is_fixed": jnp.bool_,
    "skipped_steps": jnp.int32,
    "consecutive_skips": jnp.int32,
    "skip_rate": jnp.float32,
}


@every_rule
@pytest.mark.parametrize(("jit", "x64"), [(False, False), (True, True)])
def test_every_leaf_is_a_strongly_typed_scalar(rule, jit, x64):
    with enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        init, update = rule.init, rule.update
        state = (jax.jit(init) if jit else init)()
        for grads_finite in (True, False, jnp.bool_(True), np.bool_(False)):
            assert state._fields[:-1] == tuple(TYPES)
            for name, dtype in TYPES.items():
                leaf = getattr(state, name)
                assert isinstance(leaf, jax.Array)
                assert (leaf.shape, leaf.dtype) == ((), dtype), name
                assert not leaf.weak_type, name
            for leaf in jax.tree.leaves(state[-1]):
                assert (leaf.shape, leaf.weak_type) == ((), False)
                assert leaf.dtype in (jnp.float32, jnp.int32)
            state = (jax.jit(update) if jit else update)(state, grads_finite)


@pytest.mark.parametrize(
    ("rule", "flags", "often"),
    [
        # It grows every 20 steps.
        (ls.DynamicLossScale(), [False] * 14 + ([True] * 20 + [False]) * 20, False),
        (ls.DynamicLossScale(), [False] * 90 + [True] * 400, False),
        (ls.DynamicLossScale(), [False, True, True] * 150, True),
        # A fixed scale does not come down.
        (ls.FixedLossScale(), [False] * 29, True),
        (ls.FixedLossScale(), [False] * 28, False),
    ],
)
def test_skip_rate_exceeds_a_quarter_if_a_third_is_lost(rule, flags, often):
    assert (max(run_rule(rule, flags).skip_rate) > 0.25) == often


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
    assert taken.isdisjoint(ls.LossScaleState._fields)
    assert "scale_state" not in taken


@pytest.mark.parametrize("flag", [1, None, jnp.int32(1), np.ones((1,), bool)])
def test_a_flag_that_is_not_one_boolean_is_refused(flag):
    rule = ls.DynamicLossScale()
    with pytest.raises(ValueError, match="`grads_finite` must be one boolean"):
        rule.update(rule.init(), flag)
    with pytest.raises(ValueError, match="`applied` must be one boolean"):
        rule.init().record(flag)


def test_created_state_has_counted_nothing():
    state = ls.LossScaleState.create(8.0)
    assert [*map(float, state[:-1])] == [8, 0, 1, 0, 0, 0, 0]
