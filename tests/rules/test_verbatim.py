"""VerbatimLossScale: a scale that is rounded to a narrow type."""

import jax.numpy as jnp
import pytest
from helpers import run_rule

from optax_lossscale import presets

FLOAT16 = presets.VerbatimLossScale(scale_dtype="float16", growth_interval=1)


@pytest.mark.parametrize(
    ("restored", "lowered"),
    [(2.0**126, 65504.0), (2.0**16, 2.0**15), (2.0**-126, 2.0**-24)],
)
def test_an_overflow_takes_a_restored_scale_into_what_float16_holds(restored, lowered):
    state = FLOAT16.init()._replace(loss_scale=jnp.float32(restored))
    assert float(FLOAT16.update(state, False).loss_scale) == lowered


def test_a_scale_in_float16_that_fell_all_the_way_grows_again():
    rule = presets.jmp_dynamic(jnp.float16(2.0), 1, min_loss_scale=0.0)
    scales = run_rule(rule, [False] * 28 + [True] * 2).loss_scale
    assert scales[24:].tolist() == [*[2.0**-24] * 4, 2.0**-23, 2.0**-22]
