"""What rules refuse: the call, and the words that name the way out."""

import jax
import numpy as np
import optax
import pytest

import optax_lossscale as ls

FIXED, DYNAMIC, HEADROOM = ls.FixedLossScale, ls.DynamicLossScale, ls.HeadroomLossScale
from_config = ls.LossScale.from_config
STATE, ONE, SGD = HEADROOM().init(), np.ones(1, np.float32), optax.sgd(0.1)
MANY = jax.tree.map(lambda x: np.stack([x, x]), STATE)
MANY_TRACKERS = STATE._replace(growth_tracker=MANY.growth_tracker)
MANY_MAXIMA = STATE._replace(rule_state=MANY.rule_state)
NO_NUMBER = STATE._replace(growth_tracker=None)
OPT_STATE = ls.with_loss_scaling(SGD).init(ONE)


def update(*args):
    return lambda: HEADROOM().update(*args)


class TakesNoMagnitude(DYNAMIC):
    uses_max_magnitude = True


OF_ONE, OTHER = "^`state` must .*of one run, ", r"^`state` must .*`rule_state` of Headr"
REFUSED = [
    (ls.LossScale, "abstract"),
    (lambda: from_config({}), "must be one of .* got None. Add the name"),
    *((lambda x=x: from_config(x), "`config` must be a map") for x in ("name", None)),
    (lambda: from_config({"class_name": "Unknown"}), "must be one of .* got 'Unknown'"),
    (lambda: FIXED.from_config({"class_name": "DynamicLossScale"}), "one of .'Fixed"),
    (lambda: FIXED.from_config({"scale": 1.0}), "unexpected keyword argument 'scale'"),
    (update(OPT_STATE, True, 1.0), "^`state` must .*`get_loss_scale_state` returns"),
    (update(None, True, 1.0), "^`state` must be a Loss.* got None"),
    (update(MANY, True, 1.0), f"{OF_ONE}.* inside `jax.vmap`"),
    (update(MANY_TRACKERS, True, 1.0), f"{OF_ONE}.* for `growth"),
    (update(NO_NUMBER, True, 1.0), "must .*hold numbers, got None for `growth_track"),
    (update(DYNAMIC().init(), True, 1.0), f"{OTHER}.*scale_state=rule.init"),
    (update(MANY_MAXIMA, True, 1.0), OTHER),
    (
        lambda: ls.with_loss_scaling(SGD, TakesNoMagnitude()),
        "_finite, max_magnitude.` if its",
    ),
    (update(STATE, True), "update.. missing .* argument: 'max_magnitude'"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[x for _, x in REFUSED])
def test_rules_refuse_what_they_cannot_use(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
