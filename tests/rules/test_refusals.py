"""What rules refuse, by the name that the user gave, and the way out."""

import math

import jax
import numpy as np
import optax
import pytest
from every_rule import DEFAULTS

import optax_lossscale as ls

FIXED, DYNAMIC, HEADROOM = ls.FixedLossScale, ls.DynamicLossScale, ls.HeadroomLossScale
SCALES, COUNTS = [math.nan, 0, 2.0**-127, 2.0**127], [True, 0, 1.5, 2**31]
# The last two are 0 and 1 in float32, in which rules compute.
SHARES, FLAGS = ["0.5", 0, 1, 1e-50, 1 - 1e-9], [None, 1, np.bool_(True)]
BAD = [
    (FIXED, "loss_scale", [None, 1j, [128.0], 0.999, 2.0**127]),
    (FIXED, "skip_nonfinite", FLAGS),
    *((DYNAMIC, f"{name}_scale", SCALES) for name in ("init", "min", "max")),
    *((DYNAMIC, name, COUNTS) for name in ("growth_interval", "hysteresis")),
    (DYNAMIC, "growth_factor", [1, 1 + 1e-9, math.inf]),
    (DYNAMIC, "backoff_factor", SHARES),
    (DYNAMIC, "hysteresis_refill", ["always", True]),
    *((HEADROOM, f"{name}_scale", SCALES) for name in ("init", "min", "max")),
    (HEADROOM, "headroom", [-0.1, 126.1]),
    (HEADROOM, "half_life", COUNTS),
    (HEADROOM, "backoff_factor", SHARES),
    (HEADROOM, "dtype", ["int8", "half a float", None]),
]


@pytest.mark.parametrize(("rule", "name", "values"), BAD)
def test_rule_refuses_an_argument_by_name_and_value(rule, name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^`{name}` must .*got ") as error:
            rule(**{name: value})
        assert repr(value) in str(error.value)


@pytest.mark.parametrize("rule", [type(x) for x in DEFAULTS.values()])
def test_rule_refuses_a_traced_number_and_offers_another_rule(rule):
    words = "must be a plain number, got a traced value.* continue with another one"
    for name, value in rule().get_config().items():
        if type(value) in (int, float):
            with pytest.raises(ValueError, match=f"^`{name}` {words}"):
                jax.eval_shape(lambda x, name=name: rule(**{name: x}).init(), value)


def update(state=None, *args):
    return HEADROOM().update(STATE if state is None else state, True, *args)


X, STATE, LIMITS = np.ones(2, np.float32), HEADROOM().init(), {"min_scale": 8.0}
SEVERAL = jax.tree.map(lambda x: np.stack([x, x]), STATE)
OPT_STATE = ls.with_loss_scaling(optax.sgd(0.1)).init(X)
OF_ONE, OTHER = "^`state` must .*of one run, ", r"^`state` must .*`rule_state` of Headr"
NO_NUMBER = STATE._replace(growth_tracker=None)
SEVERAL_TRACKERS = STATE._replace(growth_tracker=SEVERAL.growth_tracker)
SEVERAL_MAXIMA = STATE._replace(rule_state=SEVERAL.rule_state)
REFUSED = [
    (lambda: DYNAMIC(init_scale=4.0, **LIMITS), "^`min_scale` must .* `init_scale`"),
    (lambda: HEADROOM(init_scale=4.0, **LIMITS), "^`min_scale` must .* `init_scale`"),
    (lambda: DYNAMIC(init_scale=4.0, max_scale=2.0), "^`init_scale` .* `max_scale`"),
    (lambda: DYNAMIC(64.0, 2.0), "positional"),
    (lambda: HEADROOM(64.0, 2.0), "positional"),
    (lambda: ls.LossScale(), "abstract"),
    (lambda: ls.LossScale.from_config({}), "must be one of"),
    (lambda: ls.LossScale.from_config({"class_name": "Unknown"}), "must be one of"),
    (lambda: FIXED.from_config({"class_name": "DynamicLossScale"}), "one of .'Fixed"),
    (lambda: FIXED.from_config({"scale": 1.0}), "unexpected keyword argument 'scale'"),
    (lambda: update(OPT_STATE), "^`state` must .*`get_loss_scale_state` returns"),
    (lambda: HEADROOM().update(None, True), "^`state` must be a Loss.* got None"),
    (lambda: update(SEVERAL), f"{OF_ONE}.* inside `jax.vmap`"),
    (lambda: update(SEVERAL_TRACKERS), f"{OF_ONE}.* for `growth"),
    (lambda: update(NO_NUMBER), "must .*hold numbers, got None for `growth_track"),
    (lambda: update(DYNAMIC().init()), f"{OTHER}.*scale_state=rule.init"),
    (lambda: update(SEVERAL_MAXIMA), OTHER),
    (lambda: update(STATE, np.ones(2)), "`max_magnitude` must be one real number"),
    (lambda: update(STATE, True), "`max_magnitude` must be one real number"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_rules_refuse_what_they_cannot_use(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_limits_may_be_equal():
    for rule in (DYNAMIC, HEADROOM):
        assert rule(8.0, min_scale=8.0, max_scale=8.0).init().loss_scale == 8.0


def test_first_scale_may_be_positional():
    for rule in DEFAULTS.values():
        assert type(rule)(64.0).init().loss_scale == 64.0
