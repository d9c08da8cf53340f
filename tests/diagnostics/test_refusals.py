"""What diagnostics refuse: the words name the argument, its rule and the way out.

Numbers, types and functions are in ``tests/test_validation.py``.
"""

import jax
import numpy as np
import pytest

import optax_lossscale as ls

GRADS = [np.ones(2)]
OF_MEMBERS = ls.GradientReport(*[[np.ones(3)]] * 8)
report, suggest = ls.gradient_report, ls.suggest_loss_scale
check, show = ls.check_loss_scale, ls.format_report
# What each of them accepts.
ACCEPTED = {
    **dict.fromkeys((report, suggest), {"grads": GRADS}),
    check: {"state": ls.DynamicLossScale().init()},
    show: {"report": report(GRADS)},
}
OF_GRADS = [
    (ls.gradient_report(GRADS), "must be gradients, got a GradientReport"),
    (ls.suggest_loss_scale(GRADS), "must be gradients, got a SuggestedLossScale"),
    ({"a": np.arange(3)}, "must hold floating-point gradients, got {'a'"),
    ({"a": [1.0, "b"]}, r"must hold only arrays, got 'b' at \['a'\]\[1\]"),
]
NO_AXIS = "must name an axis of the surrounding"
REFUSED = [
    *((x, "grads", *row) for x in (report, suggest, check) for row in OF_GRADS),
    *((f, "axis_name", x, NO_AXIS) for f in (report, check) for x in ("z", ["z"])),
    (suggest, "min_scale", 2.0**25, "must not exceed `max_scale`"),
    (show, "report", {}, "must be a GradientReport"),
    (show, "report", OF_MEMBERS, "must hold one number in each leaf.* ensemble"),
]


@pytest.mark.parametrize(
    ("function", "name", "value", "words"), REFUSED, ids=[x[-1] for x in REFUSED]
)
def test_diagnostics_refuse_what_they_cannot_use(function, name, value, words):
    with pytest.raises(ValueError, match=f"`{name}` {words}"):
        function(**ACCEPTED[function] | {name: value})


STATIC = "Make it a static argument of `jax.jit`"
TRACED = [
    (suggest, "headroom", 1.0, STATIC),
    (check, "every", 1, STATIC),
    (show, "report", report(GRADS), "Return it from the compiled function"),
]


@pytest.mark.parametrize(("function", "name", "value", "way_out"), TRACED)
def test_diagnostics_refuse_traced_values(function, name, value, way_out):
    with pytest.raises(ValueError, match=f"`{name}` .*a traced value.*{way_out}"):
        jax.eval_shape(lambda x: function(**ACCEPTED[function] | {name: x}), value)
