"""Arguments at the door: what passes at, below and above each bound."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_rule import DEFAULTS

import optax_lossscale as ls
from optax_lossscale._rules.fields import check_field


def traced(fun, *args, **kwargs):
    """A function with some arguments, which is not compiled."""

    @functools.wraps(fun)
    def call(**options):
        return jax.eval_shape(lambda: fun(*args, **kwargs, **options))

    return call


FIXED, DYNAMIC, HEADROOM = ls.FixedLossScale, ls.DynamicLossScale, ls.HeadroomLossScale
STATE, MOST = HEADROOM().init(), 2**31 - 1
retries = functools.partial(ls.value_and_grad_with_retries, fun=jnp.sum, state=STATE)
block = functools.partial(ls.scale_block, jnp.sum)
report = traced(ls.gradient_report, 1.0)
show = functools.partial(ls.format_report, ls.gradient_report(1.0))
suggest = traced(ls.suggest_loss_scale, 1.0)
check = functools.partial(ls.check_loss_scale, STATE)
select = traced(ls.select, on_true=1.0, on_false=2.0)
update = traced(HEADROOM().update, STATE, max_magnitude=1.0)
measure = traced(HEADROOM().update, STATE, True)
record = traced(STATE.record)

BOTH = DYNAMIC, HEADROOM
ABSTRACT = jax.ShapeDtypeStruct((), "float32")
NO_NUMBERS = [math.nan, True, np.True_, None, "2", [2.0], 2j, np.ones(1), ABSTRACT]
NO_NUMBERS += [10**400]
SCALES = [0, 2.0**-127, 2.0**127, math.inf, *NO_NUMBERS]
SHARES = [1e-6, 1 - 1e-6], [0, 1, 1e-50, 1 - 1e-9, *NO_NUMBERS]
COUNTS = [1, MOST, 3.0, np.int64(7), jnp.int32(7)], [0, 1.5, MOST + 1, *NO_NUMBERS]
OCTAVES = [0, 126], [-0.1, 126.1, *NO_NUMBERS]
FLAGS = [True, np.True_, jnp.bool_(0)], [1, None, 0.0, jnp.int32(1), np.ones(1, bool)]
TYPES = ["float16", jnp.bfloat16, np.float64], ["int8", "half a float", None, 3]
# The function, its argument, what passes, what is refused. Open bounds are excluded
# in float32, too, in which rules compute.
ARGUMENTS = [
    (FIXED, "loss_scale", [1, np.float16(3), 2.0**126], [0.999, *SCALES]),
    (FIXED, "skip_nonfinite", [True, False], [0, 1, None, np.True_]),
    *((rule, "init_scale", [2.0**-14, 2.0**24], SCALES) for rule in BOTH),
    *((x, "min_scale", [2.0**-126, 2.0**15], SCALES) for x in (*BOTH, suggest)),
    *((x, "max_scale", [2.0**15, 2.0**126], SCALES) for x in (*BOTH, suggest)),
    *((x, "backoff_factor", *SHARES) for x in (*BOTH, retries)),
    (DYNAMIC, "growth_factor", [1 + 1e-6, 1e30], [1, 1 + 1e-9, math.inf, *NO_NUMBERS]),
    (DYNAMIC, "growth_interval", *COUNTS),
    (DYNAMIC, "hysteresis", *COUNTS),
    (DYNAMIC, "hysteresis_refill", ["finite", "growth", "change"], ["always", True]),
    *((x, "headroom", *OCTAVES) for x in (HEADROOM, block, suggest)),
    (HEADROOM, "half_life", *COUNTS),
    *((x, "dtype", *TYPES) for x in (HEADROOM, block, report, suggest)),
    (report, "loss_scale", [1, 0.5, jnp.float32(3)], [-1, jnp.ones(2), *SCALES]),
    (show, "limit", *COUNTS),
    (check, "max_consecutive_skips", [0, MOST], [-1, 1.5, MOST + 1, *NO_NUMBERS]),
    (check, "every", *COUNTS),
    (check, "value", [1, 0.5, jnp.float16(3)], [True, "2", [2.0], 2j, np.ones(1)]),
    (check, "on_error", [None, print], [1, "print"]),
    (retries, "max_retries", [0, 1], [-1, *NO_NUMBERS]),
    (retries, "fun", [jnp.sum], [None, 1, "sum"]),
    (select, "pred", *FLAGS),
    (update, "grads_finite", *FLAGS),
    (record, "applied", *FLAGS),
    (measure, "max_magnitude", [0, 1.5, jnp.float16(1)], NO_NUMBERS[1:-1]),
]


IDS = [f"{getattr(call, 'func', call).__name__}-{name}" for call, name, *_ in ARGUMENTS]


@pytest.mark.parametrize(("call", "name", "good", "bad"), ARGUMENTS, ids=IDS)
def test_argument_is_refused_by_name_and_value(call, name, good, bad):
    for value in good:
        call(**{name: value})
    for value in bad:
        shown = f"{re.escape(repr(value))}|an array of dtype|a jax.ShapeDtypeStruct"
        message = f"^`{name}` must .*got ({shown})"
        with pytest.raises((TypeError, ValueError), match=message):
            call(**{name: value})


@pytest.mark.parametrize("rule", [type(x) for x in DEFAULTS.values()])
def test_rule_refuses_a_traced_number_and_offers_another_rule(rule):
    words = "must hold concrete numbers, got a traced value.* build another one"
    for name, value in rule().get_config().items():
        if type(value) in (int, float):
            with pytest.raises(ValueError, match=f"^`{name}` {words}"):
                jax.eval_shape(lambda x, name=name: rule(**{name: x}).init(), value)


ORDER = [
    ("min_scale", 8.0, "`min_scale` must not exceed `init_scale`, got min_scale=8.0"),
    ("max_scale", 2.0, "`init_scale` must not exceed `max_scale`, got init_scale=4.0"),
]


@pytest.mark.parametrize("rule", BOTH)
def test_limits_ascend_and_may_be_equal(rule):
    assert rule(8.0, min_scale=8.0, max_scale=8.0).init().loss_scale == 8.0
    for limit, value, words in ORDER:
        with pytest.raises(ValueError, match=words):
            rule(4.0, **{limit: value})


NUMBERS = [128, np.float32(128), np.array(128.0), jnp.bfloat16(128), jnp.int32(128)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: type(x).__name__)
def test_any_kind_of_number_becomes_pythons_own(number):
    fixed, counting = FIXED(number), DYNAMIC(hysteresis=number)
    assert fixed == FIXED() and hash(fixed) == hash(FIXED())
    assert (type(fixed.loss_scale), type(counting.hysteresis)) == (float, int)


def test_type_and_its_name_make_equal_rules():
    assert HEADROOM(dtype=jnp.float16) == HEADROOM(dtype="float16")


def test_field_without_a_check_is_named():
    with pytest.raises(KeyError, match="`decay` has no check. Add one to `_CHECKS`"):
        check_field("decay", 1.0)


DESCRIBED = {
    "short text": ("x" * 78, f"'{78 * 'x'}'"),
    "long text": ("x" * 79, "an object of type str"),
    "array": (np.ones(2, "float16"), r"an array of dtype float16 and shape \(2,\)"),
    "abstract": (ABSTRACT, "a jax.ShapeDtypeStruct .* holds no number"),
}


@pytest.mark.parametrize(("value", "words"), DESCRIBED.values(), ids=DESCRIBED)
def test_value_is_described_in_a_few_words(value, words):
    with pytest.raises(ValueError, match=f"must be one boolean .*got {words}. "):
        select(pred=value)
