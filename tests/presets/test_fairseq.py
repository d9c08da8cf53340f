"""fairseq's and metaseq's smallest scales, where their loops end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_lossscale import presets

SMALLEST = 2.0**-126


@pytest.mark.parametrize(
    ("arguments", "floor"),
    [
        ({"min_loss_scale": 1e-4}, 2.0**-13),
        ({"min_loss_scale": 2.0**-5}, 2.0**-4),
        ({"min_loss_scale": 0}, SMALLEST),
        ({"threshold": 3.0}, 3.0),
        ({"threshold": 2.0**-20}, 2.0**-13),
        ({"init_scale": 4.0, "min_loss_scale": 5.0}, 4.0),
    ],
)
def test_fairseqs_floor_is_the_last_scale_above_its_minimum(arguments, floor):
    """Where fairseq raises FloatingPointError and restores the scale it had."""
    for tolerance in (0.0, 1e-6):
        rule = presets.fairseq(**arguments, tolerance=tolerance)
        assert (rule.min_scale, getattr(rule, "tolerance", 0)) == (floor, tolerance)


@given(st.floats(1.01, 16), st.floats(1e-20, 1e6), st.booleans())
def test_the_floor_is_where_the_loop_ends(factor, minimum, fairseq):
    preset = presets.fairseq if fairseq else presets.metaseq
    factor = factor if fairseq else float(math.ceil(factor))
    rule = preset(2.0**15, scale_factor=factor, min_loss_scale=minimum)
    scale = 2.0**15
    while scale / factor > minimum or (not fairseq and scale / factor == minimum):
        scale /= factor
    assert rule.min_scale == pytest.approx(scale, rel=1e-9)
    assert rule.min_scale <= rule.init_scale
