"""What holds of every rule: any state is carried on, in the types of its own."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, assert_same_types
from every_rule import PRESETS, RULES, every_rule

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def step(rule, state, grads_finite, magnitude):
    args = (magnitude,) if rule.uses_max_magnitude else ()
    return rule.update(state, grads_finite, *args)


def test_every_preset_is_here():
    assert PRESETS.keys() == {*presets.__all__}


@every_rule
def test_loaded_scale_out_of_range_is_clipped(rule):
    lowest = getattr(rule, "min_scale", SMALLEST)
    highest = getattr(rule, "max_scale", LARGEST)
    for loaded, flag in itertools.product((SMALLEST, LARGEST), (True, False)):
        state = rule.init()._replace(loss_scale=jnp.float32(loaded))
        assert lowest <= step(rule, state, flag, 2.0**-10).loss_scale <= highest


@every_rule
def test_counters_saturate(rule):
    most = np.iinfo(np.int32).max
    full = jax.tree.map(
        lambda x: jnp.int32(most) if x.dtype == jnp.int32 else x, rule.init()
    )
    for flag in (True, False):
        for leaf in jax.tree.leaves(step(rule, full, flag, 1.0)):
            assert leaf.dtype != jnp.int32 or int(leaf) >= 0
    state = step(rule, full, False, 1.0)
    assert int(state.skipped_steps) == int(state.consecutive_skips) == most


@every_rule
def test_numbers_of_other_types_are_converted(rule):
    @jax.jit
    def steps(first):
        states = [
            optax.tree.set(first, loss_scale=value, skipped_steps=7.0)
            for value in (8, np.float64(8), jnp.bfloat16(8))
        ]
        states = [step(rule, state, True, 2.0**-10) for state in states]
        for dtype in (jnp.float16, jnp.float32, None):
            cast = jax.tree.map(lambda x, t=dtype: x.astype(t or x.dtype), states[2])
            states.append(step(rule, cast, True, 2.0**-10))
        return states

    first = rule.init()
    states = steps(first)
    for state in states:
        assert_same_types(state, first)
        assert int(state.skipped_steps) == 7
        assert all(np.isfinite(x) for x in jax.tree.leaves(state))
    assert_same_bits(*states[-2:])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_configuration_goes_through_json_and_comes_back_equal(rule):
    config = json.loads(json.dumps(rule.get_config(), allow_nan=False))
    again = ls.LossScale.from_config(config)
    assert again == rule and hash(again) == hash(rule) and repr(again) == repr(rule)
    assert config.pop("class_name") == type(rule).__name__
    assert type(rule).from_config(config) == rule
    assert not callable(rule), "`inject_hyperparams` would take it for a schedule"
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.loss_scale = 4.0


def test_rules_are_equal_by_class_and_numbers():
    rule = ls.FixedLossScale(8.0)
    assert repr(rule) == "FixedLossScale(loss_scale=8.0, skip_nonfinite=True)"
    distinct = {repr(rule): rule for rule in RULES.values()}.values()
    assert len(set(distinct)) == len(distinct)


@pytest.mark.parametrize("rule", [ls.DynamicLossScale(), ls.HeadroomLossScale()])
def test_eager_update_moves_nothing_between_host_and_device(rule):
    args = rule.init(), jnp.bool_(False), *[jnp.float32(1)] * rule.uses_max_magnitude
    with jax.transfer_guard("disallow"):
        rule.update(*args)


MEASURING = [rule for rule in RULES.values() if rule.uses_max_magnitude]


@pytest.mark.parametrize("rule", MEASURING, ids=repr)
def test_magnitude_that_is_zero_or_nan_says_nothing(rule):
    """A maximum may be NaN where the flag is False."""
    assert float(rule.update(rule.init(), True, 0.0).loss_scale) == rule.init_scale
    state = rule.update(rule.init(), True, 2.0**-10)
    for flag in (True, False):
        expected = rule.update(state, flag, 0.0)
        assert_same_bits(rule.update(state, flag, jnp.nan), expected)
