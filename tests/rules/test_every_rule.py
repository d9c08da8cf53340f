"""What holds of every rule."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import PRESETS, RULES
from helpers import assert_same_bits, assert_same_types, run_rule
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126
INT32 = np.iinfo(np.int32)

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

# Presets of a class that is tried without them differ in their numbers alone.
COMMON = (ls.FixedLossScale, ls.DynamicLossScale)
LIKE_OTHERS = {name: rule for name, rule in PRESETS.items() if isinstance(rule, COMMON)}
AT_LENGTH = {name: rule for name, rule in RULES.items() if name not in LIKE_OTHERS}
every_rule_at_length = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=pytest.mark.slow, id=name)
        if name in LIKE_OTHERS
        else pytest.param(rule, id=name)
        for name, rule in RULES.items()
    ],
)


def advance(rule, state, grads_finite, magnitude):
    args = (magnitude,) if rule.uses_max_magnitude else ()
    return rule.update(state, grads_finite, *args)


def test_every_preset_is_here():
    functions = inspect.getmembers(presets, inspect.isfunction)
    names = {n for n, _ in functions if not n.startswith("_")}
    assert PRESETS.keys() == {n for n in names if not n.endswith("_state_dict")}


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
counts = st.integers(INT32.min, INT32.max)


@every_rule_at_length
@given(data=st.data())
@settings(max_examples=25)
def test_any_loaded_state_gives_a_sound_one_of_the_same_structure(rule, data):
    first = rule.init()
    draws = {
        np.dtype(np.float32): floats,
        np.dtype(np.int32): counts,
        np.dtype(bool): st.booleans(),
    }
    loaded = jax.tree.map(
        lambda x: jnp.asarray(data.draw(draws[x.dtype]), x.dtype), first
    )
    flags = data.draw(st.lists(st.booleans(), min_size=1, max_size=3))
    magnitude = jnp.float32(data.draw(floats))
    state = loaded
    for flag in flags:
        state = advance(rule, state, flag, magnitude)
        assert_same_types(state, first)
        if rule.skip_nonfinite:
            assert SMALLEST <= float(state.loss_scale) <= LARGEST
            assert ls.all_finite(state)
        else:
            assert_same_bits(state, loaded)  # costs nothing: nothing is looked at


@every_rule_at_length
@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0, 2.0**80, width=32)),
        min_size=20,
        max_size=40,
    )
)
@settings(max_examples=10)
def test_the_scale_stays_between_the_limits(rule, run):
    state, scale = rule.init(), None
    lowest = getattr(rule, "min_scale", 1.0)
    highest = getattr(rule, "max_scale", LARGEST)
    # Where other systems start outside of their limits, so do their rules.
    initial = float(state.loss_scale)
    lowest, highest = min(lowest, initial), max(highest, initial)
    for flag, magnitude in run:
        state = advance(rule, state, flag, magnitude)
        scale = float(state.loss_scale)
        assert lowest <= scale <= highest


@every_rule_at_length
def test_counters_saturate(rule):
    if not rule.skip_nonfinite:
        pytest.skip("nothing is counted")
    full = jax.tree.map(
        lambda x: jnp.full_like(x, INT32.max) if x.dtype == jnp.int32 else x,
        rule.init(),
    )
    for flag in (True, False):
        for leaf in jax.tree.leaves(advance(rule, full, flag, 1.0)):
            # DeepSpeed's count begins at -1.
            assert leaf.dtype != jnp.int32 or int(leaf) >= -1
    state = advance(rule, full, False, 1.0)
    assert int(state.skipped_steps) == int(state.consecutive_skips) == INT32.max


@every_rule
def test_a_configuration_goes_through_json_and_comes_back_equal(rule):
    config = json.loads(json.dumps(rule.get_config(), allow_nan=False))
    again = ls.LossScale.from_config(config)
    assert again == rule and hash(again) == hash(rule)
    assert type(rule).from_config(config) == rule
    assert config.pop("class_name") == type(rule).__name__
    assert type(rule).from_config(config) == rule
    assert repr(again) == repr(rule) and not callable(rule)


def test_rules_that_differ_are_not_equal():
    distinct = {repr(rule): rule for rule in RULES.values()}.values()
    assert len(set(distinct)) == len(distinct)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(AT_LENGTH, id="at length"),
        pytest.param(LIKE_OTHERS, marks=pytest.mark.slow, id="like others"),
    ],
)
def test_a_run_is_traced_once(rules):
    """One program takes a step with each rule, and is compiled in less time."""
    params = {"w": jnp.ones(3)}
    txs = {n: ls.with_loss_scaling(optax.sgd(1e-3), r) for n, r in rules.items()}
    traces = []

    @jax.jit
    def step(opt_states, good, bad):
        traces.append(1)
        steps = {}
        for name, tx in txs.items():
            grads = bad if rules[name].skip_nonfinite else good
            steps[name] = tx.update({"w": grads}, opt_states[name], params)
        return [{name: s[i] for name, s in steps.items()} for i in (0, 1)]

    first = opt_states = {name: tx.init(params) for name, tx in txs.items()}
    for value in (1.0, 0.0, np.inf, 1e-6):
        bad = np.full(3, value, np.float32)
        good = np.where(np.isfinite(bad), bad, np.float32(1.0))
        updates, opt_states = step(opt_states, good, bad)
        for x in jax.tree.leaves((updates, opt_states)):
            assert np.all(np.isfinite(x))
    assert len(traces) == 1
    assert_same_types(opt_states, first)
    for name, rule in rules.items():
        skipped_steps = opt_states[name].scale_state.skipped_steps
        assert int(skipped_steps) == int(rule.skip_nonfinite), name


@every_rule_at_length
def test_numbers_that_are_traced_act_as_pythons_own(rule):
    """As ``optax.inject_hyperparams`` has them, and the tests of each rule."""
    flags, magnitudes = np.arange(12) % 5 != 3, 2.0 ** -np.arange(12.0)
    states = run_rule(rule, flags, magnitudes)
    state = rule.init()
    for i, (flag, magnitude) in enumerate(zip(flags, magnitudes, strict=True)):
        state = advance(rule, state, bool(flag), magnitude)
        traced = jax.tree.map(lambda x, i=i: x[i], states)
        for a, e in zip(jax.tree.leaves(traced), jax.tree.leaves(state), strict=True):
            # The averages of the log-normal rule round differently.
            rtol = 1e-4 if isinstance(rule, ls.LogNormalLossScale) else 0
            np.testing.assert_allclose(a, e, rtol=rtol)


@pytest.mark.parametrize("value", ["1", None, jnp.ones(2), True, 1j, [1.0]])
def test_a_magnitude_that_is_no_number_is_refused(value):
    for rule in (ls.HeadroomLossScale(), ls.LogNormalLossScale()):
        with pytest.raises(ValueError, match="`max_magnitude` must be one real number"):
            rule.update(rule.init(), True, value)


@pytest.mark.parametrize("name", ["headroom", "log-normal"])
def test_a_magnitude_that_is_nan_says_nothing(name):
    """A maximum may be NaN where the flag is False, or in a state that was loaded."""
    rule = RULES[name]
    state = rule.update(rule.init(), True, 2.0**-10)
    for flag in (True, False):
        assert_same_bits(
            rule.update(state, flag, jnp.nan), rule.update(state, flag, 0.0)
        )
    lost = state._replace(
        rule_state=jax.tree.map(lambda x: x * jnp.nan, state.rule_state)
    )
    fresh = rule.update(rule.init(), True, 2.0**-12)
    assert_same_bits(rule.update(lost, True, 2.0**-12), fresh)
