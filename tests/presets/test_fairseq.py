"""fairseq's smallest scale, where its loop ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_lossscale import presets

SMALLEST = 2.0**-126


@given(st.floats(1.01, 16), st.floats(1e-20, 1e6))
def test_the_floor_is_where_the_loop_ends(factor, minimum):
    rule = presets.fairseq(2.0**15, scale_factor=factor, min_loss_scale=minimum)
    scale = 2.0**15
    while scale / factor > minimum:
        scale /= factor
    assert rule.min_scale == pytest.approx(scale, rel=1e-9)
    assert rule.min_scale <= rule.init_scale
