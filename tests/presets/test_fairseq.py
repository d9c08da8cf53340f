"""fairseq's and metaseq's smallest scales, where their loops end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_lossscale import presets

SMALLEST = 2.0**-126


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
