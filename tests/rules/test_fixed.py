"""FixedLossScale: the rule that stands still."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_rule

import optax_lossscale as ls


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**100])
def test_the_fixed_scale_never_changes_and_skips_are_counted(scale):
    flags = [True, False, False, True, False]
    states = run_rule(ls.FixedLossScale(scale), flags)
    assert states.applied.tolist() == flags
    assert set(states.loss_scale) == {np.float32(scale)}
    assert states.skipped_steps.tolist() == [0, 1, 2, 2, 3]
    assert states.consecutive_skips.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("lost", [0.0, jnp.inf, jnp.nan, 2.0**-127, 2.0**127])
def test_a_restored_scale_is_kept_unless_it_cannot_be_divided_by(lost):
    rule = ls.FixedLossScale(8.0)
    for restored, expected in ((lost, 8.0), (0.5, 0.5), (2.0**126, 2.0**126)):
        state = rule.init()._replace(loss_scale=jnp.float32(restored))
        assert float(rule.update(state, True).loss_scale) == expected
