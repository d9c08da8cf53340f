"""FixedLossScale: the rule that stands still."""

import numpy as np
import pytest
from training import run_rule

import optax_lossscale as ls


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**100])
def test_the_fixed_scale_never_changes_and_skips_are_counted(scale):
    flags = [True, False, False, True, False]
    states = run_rule(ls.FixedLossScale(scale), flags)
    assert states.applied.tolist() == flags
    assert set(states.loss_scale) == {np.float32(scale)}
    assert states.skipped_steps.tolist() == [0, 1, 2, 2, 3]
    assert states.consecutive_skips.tolist() == [0, 1, 2, 0, 1]
