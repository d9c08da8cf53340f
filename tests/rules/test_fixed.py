"""FixedLossScale: the rule that stands still."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import run_rule
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ls

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "128", None, 1j, [128.0]]


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0, -1, 0.5, 0.999, 2.0**127, 10**400])
def test_a_bad_scale_is_refused_with_a_way_out(value):
    with pytest.raises(ValueError, match="`loss_scale` must be a number from 1") as e:
        ls.FixedLossScale(value)
    assert repr(value) in str(e.value) and "use 1" in str(e.value)


@pytest.mark.parametrize("value", [None, 1, 0, "no", np.bool_(True)])
def test_skip_nonfinite_must_be_a_bool(value):
    with pytest.raises(ValueError, match="`skip_nonfinite` must be True or False"):
        ls.FixedLossScale(skip_nonfinite=value)


@pytest.mark.parametrize(
    "value",
    [
        128,
        np.float32(128),
        np.int64(128),
        np.asarray(128.0),
        ml_dtypes.bfloat16(128),
        jnp.float32(128),
    ],
)
def test_any_kind_of_number_becomes_a_python_float(value):
    rule = ls.FixedLossScale(value)
    assert type(rule.loss_scale) is float
    assert rule == ls.FixedLossScale(128.0) == ls.FixedLossScale()
    assert hash(rule) == hash(ls.FixedLossScale())


@given(st.floats(1, 2.0**100), st.lists(st.booleans(), min_size=1, max_size=8))
def test_the_fixed_scale_never_changes_and_skips_are_counted(scale, flags):
    states = run_rule(ls.FixedLossScale(scale), flags)
    assert states.grads_finite.tolist() == flags
    assert set(states.loss_scale) == {np.float32(scale)}
    assert states.skipped_steps[-1] == flags.count(False)


def test_without_skipping_nothing_is_recorded():
    rule = ls.FixedLossScale(skip_nonfinite=False)
    state = rule.update(rule.init(), False)
    assert bool(state.grads_finite) and int(state.skipped_steps) == 0
