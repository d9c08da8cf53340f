"""What holds of every rule: any state is carried on, in the types of its own."""

import inspect
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, assert_same_types
from every_rule import DEFAULTS, RULES, every_rule

import optax_lossscale as ls

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def step(rule, state, grads_finite, magnitude):
    args = (magnitude,) if rule.uses_max_magnitude else ()
    return rule.update(state, grads_finite, *args)


@every_rule
def test_loaded_scale_out_of_range_is_clipped(rule):
    own = rule.init().loss_scale  # the only scale of a fixed rule
    lowest, highest = (getattr(rule, f"{x}_scale", own) for x in ("min", "max"))
    for loaded, flag in itertools.product((SMALLEST, LARGEST), (True, False)):
        state = rule.init()._replace(loss_scale=jnp.float32(loaded))
        assert lowest <= step(rule, state, flag, 2.0**-10).loss_scale <= highest


@every_rule
def test_counters_saturate(rule):
    most, first = jnp.int32(2**31 - 1), rule.init()
    full = jax.tree.map(lambda x: most if x.dtype == jnp.int32 else x, first)
    good, bad = (step(rule, full, flag, 1.0) for flag in (True, False))
    counts = [x for x in jax.tree.leaves((good, bad)) if x.dtype == jnp.int32]
    assert min(counts) >= 0 and bad.skipped_steps == bad.consecutive_skips == most


@every_rule
def test_update_counts_skipped_steps_and_their_average(rule):
    """The average moves by a hundredth in each step. Some rules skip nothing."""
    skips = int(rule.skip_nonfinite)
    skipped = step(rule, rule.init(), False, np.nan)
    applied = step(rule, skipped, True, 1.0)
    for state, in_a_row, rate in ((skipped, skips, 0.01), (applied, 0, 0.0099)):
        assert (state.skipped_steps, state.consecutive_skips) == (skips, in_a_row)
        np.testing.assert_allclose(state.skip_rate, skips * rate, rtol=1e-6)


@every_rule
def test_state_of_other_types_is_converted(rule):
    first = rule.init()._replace(loss_scale=jnp.float32(8), skipped_steps=jnp.int32(7))
    expected = step(rule, first, True, 2.0**-10)
    given = [
        optax.tree.set(first, loss_scale=scale, skipped_steps=7.0)
        for scale in (8, np.float64(8), jnp.bfloat16(8))
    ]
    for dtype in (np.float16, np.float32):
        given.append(jax.tree.map(lambda x, t=dtype: np.asarray(x).astype(t), first))
    for state in given:
        new = step(rule, state, True, 2.0**-10)
        assert_same_types(new, expected)
        assert_same_bits(new, expected)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_configuration_goes_through_json_and_comes_back_equal(rule):
    config = json.loads(json.dumps(rule.get_config(), allow_nan=False))
    again = ls.LossScale.from_config(config)
    assert again == rule and hash(again) == hash(rule)
    assert config.pop("class_name") == type(rule).__name__
    assert type(rule).from_config(config) == rule


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rule_shows_the_code_that_makes_it(rule):
    assert eval(repr(rule), dict(vars(ls))) == rule


def test_rules_are_equal_if_their_reprs_are():
    for one, other in itertools.combinations(RULES.values(), 2):
        assert (one == other) == (repr(one) == repr(other)), (one, other)


def test_no_rule_is_callable():
    """``optax.inject_hyperparams`` would take it for a schedule."""
    assert not any(map(callable, DEFAULTS.values()))


def test_help_of_update_names_a_magnitude_if_the_rule_takes_one():
    for rule in DEFAULTS.values():
        text = inspect.getdoc(type(rule).update)
        assert ("max_magnitude" in text) == rule.uses_max_magnitude


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("rule", DEFAULTS.values(), ids=DEFAULTS)
def test_eager_update_transfers_nothing(rule):
    args = rule.init(), jnp.bool_(False), *[jnp.float32(1)] * rule.uses_max_magnitude
    with jax.transfer_guard("disallow"):
        rule.update(*args)


MEASURING = {name: rule for name, rule in RULES.items() if rule.uses_max_magnitude}


@pytest.mark.parametrize("rule", MEASURING.values(), ids=MEASURING)
def test_zero_magnitude_keeps_the_scale_and_nan_counts_as_zero(rule):
    """A maximum may be NaN where the flag is False."""
    assert float(rule.update(rule.init(), True, 0.0).loss_scale) == rule.init_scale
    state = rule.update(rule.init(), True, 2.0**-10)
    for flag in (True, False):
        expected = rule.update(state, flag, 0.0)
        assert_same_bits(rule.update(state, flag, jnp.nan), expected)
