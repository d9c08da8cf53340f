"""What diagnostics refuse: the words name the argument, its rule and the way out."""

import math

import jax
import numpy as np
import optax
import pytest

import optax_lossscale as ls

X, MANY = [np.ones(2)], np.ones(2)
OF_MEMBERS = ls.GradientReport(*[[np.ones(3)]] * 8)
report, suggest = ls.gradient_report, ls.suggest_loss_scale
check, show = ls.check_loss_scale, ls.format_report
# What each of them accepts.
ACCEPTED = {
    **dict.fromkeys((report, suggest), {"grads": X}),
    check: {"state": ls.DynamicLossScale().init()},
    show: {"report": report(X)},
}
GRADS = [
    ("grads", {"a": np.arange(3)}, "must hold floating-point gradients, got {'a'"),
    ("grads", {"a": [1.0, "b"]}, r"must hold only arrays, got 'b' at \['a'\]\[1\]"),
    *(("dtype", x, "must be a floating-point type") for x in ("int8", "float17", None)),
]
REFUSED = [
    *((function, *row) for function in (report, suggest) for row in GRADS),
    *(
        (report, "loss_scale", x, "must be a number from 2")
        for x in (0, math.inf, True, MANY, np.array(True))
    ),
    (report, "axis_name", "data", "must name an axis of the surrounding"),
    (suggest, "min_scale", 0, "must be a number from "),
    (suggest, "max_scale", 2.0**127, "must be a number from "),
    (suggest, "headroom", -1, "must be a number from "),
    (suggest, "headroom", "3", "must be a number from "),
    (suggest, "min_scale", 2.0**25, "must not exceed `max_scale`"),
    (show, "report", {}, "must be a GradientReport"),
    (show, "report", OF_MEMBERS, "must hold one number in each leaf.* ensemble"),
    (show, "limit", 0, "must be a whole number from 1"),
    (check, "max_consecutive_skips", -1, "must be a whole number from 0"),
    (check, "every", 0, "must be a whole number from 1"),
    (check, "state", optax.EmptyState(), "must be what the `init"),
    (check, "grads", "gradients", "must hold only arrays"),
    (check, "grads", np.arange(3), "must hold floating-point gradients"),
    (check, "value", MANY, "must be .* the unscaled loss, which `value_and"),
    (check, "axis_name", "z", "must name an axis of the surrounding"),
    (check, "on_error", "print", "must be a function"),
]


@pytest.mark.parametrize(("function", "name", "value", "words"), REFUSED)
def test_diagnostics_refuse_what_they_cannot_use(function, name, value, words):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` {words}"):
        function(**ACCEPTED[function] | {name: value})


TRACED = [
    *((suggest, x, 1.0) for x in ("min_scale", "max_scale", "headroom")),
    (show, "report", report(X)),
]


@pytest.mark.parametrize(("function", "name", "value"), TRACED)
def test_diagnostics_refuse_traced_values(function, name, value):
    way_out = "Return it from the compiled function" if function is show else ""
    with pytest.raises(ValueError, match=f"`{name}` .*a traced value.*{way_out}"):
        jax.eval_shape(lambda x: function(**ACCEPTED[function] | {name: x}), value)
