"""fairseq's and metaseq's floors, where their loops end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_fairseqs_floor_is_the_last_scale_above_its_minimum(tolerance):
    """Where fairseq raises FloatingPointError and restores the scale it had."""
    for minimum, floor in ((1e-4, 2.0**-13), (2.0**-5, 2.0**-4)):
        rule = presets.fairseq(min_loss_scale=minimum, tolerance=tolerance)
        assert rule.min_scale == floor
    assert presets.fairseq(min_loss_scale=0, tolerance=tolerance).min_scale == SMALLEST
    assert presets.metaseq(min_loss_scale=2.0**-5).min_scale == 2.0**-5
    assert presets.metaseq(min_loss_scale=5.0, init_scale=4.0).min_scale == 4.0
    assert presets.fairseq(threshold=3.0, tolerance=tolerance).min_scale == 3.0
    with pytest.raises(ValueError, match="^`threshold` must be a number from 2"):
        presets.fairseq(threshold=0, min_loss_scale=0, tolerance=tolerance)
    # A floor that rounding would put above the first scale.
    rule = presets.fairseq(497087.52444335265, 1.5, min_loss_scale=331391.6829622351)
    assert rule.min_scale <= rule.init_scale


@given(st.floats(1.01, 16), st.floats(1e-20, 1e4), st.booleans())
def test_fairseqs_floor_is_where_its_loop_ends(factor, minimum, strict):
    make = presets.fairseq if strict else presets.metaseq
    factor = factor if strict else float(math.ceil(factor))
    rule = make(2.0**15, scale_factor=factor, min_loss_scale=minimum)
    scale = 2.0**15
    while scale / factor > minimum or (not strict and scale / factor == minimum):
        scale /= factor
    assert rule.min_scale == pytest.approx(scale, rel=1e-9)
