"""LossScaleState: types, counters, names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import RULES as EVERY_RULE
from helpers import enable_x64, run_rule

import optax_lossscale as ls

TYPES = {
    "loss_scale": jnp.float32,
    "growth_tracker": jnp.int32,
    "hysteresis_tracker": jnp.int32,
    "applied": jnp.bool_,
    "skipped_steps": jnp.int32,
    "consecutive_skips": jnp.int32,
    "skip_rate": jnp.float32,
}
RULES = [
    ls.FixedLossScale(),
    ls.FixedLossScale(skip_nonfinite=False),
    ls.DynamicLossScale(),
    ls.DynamicLossScale(hysteresis=3, hysteresis_refill="growth"),
]
OTHERS = ["headroom", "log-normal", "metaseq", "deepspeed", "jmp in bfloat16"]


@pytest.mark.parametrize("rule", [*RULES, *map(EVERY_RULE.get, OTHERS)], ids=str)
@pytest.mark.parametrize(
    "jit, x64",
    [
        *((False, False), (True, True)),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
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


def test_a_rule_state_is_empty_by_default_and_adds_no_leaf():
    state = ls.DynamicLossScale().init()
    assert state.rule_state == () and len(jax.tree.leaves(state)) == len(TYPES)
    assert ls.LossScaleState(*state[:-1]) == state
    own = (jnp.zeros(()),)
    assert ls.LossScaleState.create(8.0, rule_state=own).rule_state is own


def test_leaves_share_no_buffer_so_the_state_can_be_donated():
    state = ls.DynamicLossScale().init()
    step = jax.jit(ls.DynamicLossScale().update, donate_argnums=0)
    for _ in range(3):
        state = step(state, jnp.bool_(True))
    assert int(state.growth_tracker) == 3


HEALTHY = {
    "a start from 2^24 that skips 14 steps": [False] * 14 + [True] * 400,
    "a growth interval of 20": [False] * 14 + ([True] * 20 + [False]) * 20,
    "one long run of skips": [False] * 90 + [True] * 400,
}
LOSING = {
    "NaN in every second batch": [True, False] * 200,
    "NaN in two of three batches": [False, False, True] * 150,
    "NaN in every third batch": [False, True, True] * 150,
}


@pytest.mark.parametrize("name", [*HEALTHY, *LOSING])
def test_the_skip_rate_is_above_a_quarter_only_if_every_third_step_is_lost(name):
    flags = (HEALTHY | LOSING)[name]
    rates = run_rule(ls.FixedLossScale(), flags).skip_rate
    assert (max(rates) > 0.25) == (name in LOSING)
    if name in LOSING:
        assert float(rates[-1]) == pytest.approx(1 - np.mean(flags), abs=0.03)


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


@pytest.mark.parametrize(
    "flag", [1, 1.0, "yes", None, jnp.int32(1), jnp.ones(2, bool), np.ones((1,), bool)]
)
def test_a_flag_that_is_not_one_boolean_is_refused(flag):
    for rule in RULES:
        with pytest.raises(ValueError, match="`grads_finite` must be one boolean"):
            rule.update(rule.init(), flag)
    with pytest.raises(ValueError, match="`applied` must be one boolean"):
        ls.LossScaleState.create(1.0).record(flag)


@pytest.mark.parametrize("count", [np.inf, -np.inf, np.nan, 2.5, np.float16(np.inf)])
def test_counters_of_other_types_become_whole_numbers(count):
    """A cast of the whole optimizer state to float16 makes infinities of them."""
    names = "skipped_steps", "growth_tracker", "consecutive_skips"
    counts = zip(names, (count, count, jnp.float16(count)), strict=True)
    state = ls.DynamicLossScale().init()._replace(**dict(counts))
    new_state = ls.DynamicLossScale().update(state, False)
    for name in names:
        x = getattr(new_state, name)
        assert x.dtype == jnp.int32 and x >= 0
    assert ls.get_loss_scale_state(state).skipped_steps.dtype == jnp.int32
