"""The message of the guard names the fault that a program has, and the fix."""

import functools
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from book import PAGES, headings
from shared import ROOT
from training import normal

import optax_lossscale as ls

DATA, FORWARD = "the batch, the parameters", "an activation is above 65504"
LOW, HIGH = (
    "gradients overflow even at this scale",
    "the scale is too high, if it is fixed",
)
DERIVATIVE, EMPTY = "a derivative is infinite (`sqrt`", "a mean over nothing is 0/0"
OVERFLOW, MORE = "or the gradients overflow. ", "Pass `grads=grads` and"
LAYER, OLD_STATE = "one layer overflows in the backward", "gets another state than"
LABEL, BATCHES = "a label is out of range", "some batches contain NaN"
LOSS = "the loss itself is above 65504"
ITSELF = "your program passes `value=nan`"
WRONG_WAY, CHECKED = "`grads_finite` is inverted", "with `check_updates=True`"

DEFAULT, UNIT = ls.DynamicLossScale(), ls.FixedLossScale(1.0)
W, X, NO_ROW = normal(8, 8), normal(64, 8), np.zeros(64, bool)
ONE, NAN, BAD = np.float32(1.0), np.float32(np.nan), np.float32([100.0, np.nan])
COUNTED, FIRST_CLASS = np.int32(-100), np.float32(np.arange(8) == 0)


def message(state, **arguments):
    """The error or, as warnings are errors, the warning."""
    with pytest.raises((ls.LossScaleError, UserWarning)) as error:
        ls.check_loss_scale(state, **{"max_consecutive_skips": 2} | arguments)
    return " ".join(str(error.value).splitlines())


def stopped(rule):
    """The state of a rule after three skips, at its first scale."""
    three = jnp.int32(3)
    return rule.init()._replace(consecutive_skips=three, skipped_steps=three)


def half(x):
    return x.astype(jnp.float16)


def label_loss(w, label):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(X @ w, jnp.full(64, label)).mean()


def masked_classes(w, weights):
    logs = jax.nn.log_softmax(jnp.where(jnp.arange(8) < 5, X @ w, -jnp.inf))
    return -jnp.mean(weights * logs)


LOSSES = {
    "float16": lambda w, x: jnp.mean(jnp.float32(half(x) @ half(w)) ** 2),
    "float32": lambda w, x: jnp.mean((x @ w) ** 2),
    "float16 loss": lambda w, x: jnp.mean(jnp.float32(jnp.square(half(w)))),
    "sum": lambda w, x: 1e9 * jnp.sum(jnp.float32(half(x) @ half(w))),
    "norm": lambda w, x: jnp.linalg.norm(w @ x[0]),
    "root": lambda w, x: jnp.sqrt(w[0, 0]),
    "k3": lambda w, x: jnp.mean(jnp.minimum(jnp.exp(w + 100) - w - 101, 10)),
    "mean": lambda w, mask: jnp.sum(X @ w[0] * mask) / jnp.sum(mask),
    "label": label_loss,
    "classes": masked_classes,
}
LOW_RULE, HIGH_RULE = ls.DynamicLossScale(1.0), ls.FixedLossScale(2.0**24)
FAULTS = {
    "NaN in the batch": ("float16", W, X * NAN, DEFAULT, DATA),
    "large activations": ("float16", 1e6 * W, X, DEFAULT, FORWARD),
    "mean over nothing": ("mean", W, NO_ROW, DEFAULT, EMPTY),
    "label out of range": ("label", W, COUNTED, DEFAULT, LABEL),
    "inf times 0": ("classes", W, FIRST_CLASS, DEFAULT, "mask multiplies inf"),
    "large float16 loss": ("float16 loss", 300 * W, X, LOW_RULE, LOSS),
    "sum": ("sum", W, X, LOW_RULE, LOW),
    "sum, scale below 1": ("sum", W, X, ls.DynamicLossScale(2.0**-14), LOW),
    "high scale": ("float16", W, X, HIGH_RULE, HIGH),
    "norm of 0, NaN": ("norm", 0 * W, X, DEFAULT, DERIVATIVE),
    "root of 0, inf": ("root", 0 * W, X, DEFAULT, DERIVATIVE),
    "clip after exp": ("k3", W, X, DEFAULT, "`exp` before a clip"),
    # Without a scale, neither the scale nor float16 is a cause.
    "unscaled, NaN in the batch": ("float32", W, X * NAN, UNIT, DATA),
    "unscaled, divergence": ("float32", 1e30 * W, X, UNIT, "training diverges (clip"),
    "unscaled, mean over nothing": ("mean", W, NO_ROW, UNIT, EMPTY),
    "unscaled, label out of range": ("label", W, COUNTED, UNIT, LABEL),
    "unscaled, root of 0": ("root", 0 * W, X, UNIT, DERIVATIVE),
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(loss, state, *args):
    return ls.value_and_grad(loss, state)(*args)


@pytest.mark.parametrize(
    ("loss", "w", "x", "rule", "cause"), FAULTS.values(), ids=FAULTS
)
def test_message_names_the_fault_of_the_loss(loss, w, x, rule, cause):
    state = stopped(rule)
    value, grads = value_and_grad(LOSSES[loss], state, w, x)
    text = message(state, grads=grads, value=value)
    assert cause in text
    # Only finite gradients put the blame on the loss itself.
    assert (LOSS in text) == (rule is not UNIT and bool(np.all(np.isfinite(grads))))


STOPPED, APPLIED = stopped(DEFAULT), {"consecutive_skips": 0}
SHARE = {"consecutive_skips": 1, "skip_rate": 0.3}
NUMBERS = " Loss scale: 32768. Skipped in all: 3. Likely causes: "
ROW = (
    "The last 3 steps were all skipped, more than `max_consecutive_skips`=2." + NUMBERS
)
SHARES = "Recently, 30% of the steps were skipped." + NUMBERS
UNSCALED = APPLIED | {"loss_scale": 1.0, "is_fixed": True}
OFTEN = UNSCALED | {"skip_rate": 0.06, "skipped_steps": 61}
SIXTY, LIMIT = {"consecutive_skips": 60}, {"max_consecutive_skips": 100}
FIXED, LONG = {"is_fixed": True, "skip_rate": 0.45}, "More than 50 steps in a row"
TOP = APPLIED | {"loss_scale": 2.0**24, "growth_tracker": 500, "skipped_steps": 0}
ZEROS = ["All gradients are exactly 0. Likely", "does not reach"]
NO_LABEL = "no label of the batch counts"
INVALID, UNDONE = "The loss scale is not a", "The gradients or the loss are not finite"
VALUE = "the `value` that `update` got"
INFINITE = "a divisor is inf in float16"
# What differs in the state; what is known; the words, in their order.
KNOWN = {
    "nothing": ({}, {}, [ROW + DATA, FORWARD, ITSELF, OVERFLOW, MORE]),
    "60 of 60": (SIXTY, LIMIT, [LONG, DATA, FORWARD, ITSELF, MORE]),
    "60 of 60, fixed": (SIXTY | FIXED, LIMIT, ["Recently, 45%", DATA, ITSELF, MORE]),
    "bad gradients": ({}, {"grads": BAD}, [ROW + DATA, FORWARD, OVERFLOW, MORE]),
    "finite loss": ({}, {"value": ONE}, [ROW + HIGH, DERIVATIVE, OLD_STATE, LAYER]),
    "bad loss": ({}, {"value": NAN}, [ROW + DATA, FORWARD, EMPTY]),
    "finite gradients": ({}, {"grads": ONE}, [ROW + VALUE, ITSELF, WRONG_WAY, CHECKED]),
    "all finite": (
        {},
        {"grads": ONE, "value": ONE},
        [ROW + CHECKED, ITSELF, WRONG_WAY],
    ),
    "high rate": (SHARE, {}, [SHARES + BATCHES, FORWARD, "raise `growth_interval`"]),
    "scale of NaN": ({"loss_scale": NAN}, {}, [INVALID, "restored from a", "(set a"]),
    "bad gradients, applied": (
        APPLIED,
        {"grads": BAD},
        [UNDONE, "an `if` or `lax.cond`"],
    ),
    "zeros": (APPLIED, {"grads": 0 * ONE}, [*ZEROS, NO_LABEL, INFINITE, "is too low"]),
    "zeros, unscaled": (UNSCALED, {"grads": 0 * ONE}, [*ZEROS, NO_LABEL, "in float16"]),
    "2**24": (TOP, {}, ["The loss scale is 2**24 or more. None", "jax.value_and_grad"]),
    "often, unscaled": (
        OFTEN,
        {},
        ["More than 5%", BATCHES, DERIVATIVE, "`exp` before a clip). https"],
    ),
}


@pytest.mark.parametrize(("numbers", "known", "words"), KNOWN.values(), ids=KNOWN)
def test_message_begins_with_the_event_and_lists_its_causes_in_order(
    numbers, known, words
):
    text = message(STOPPED._replace(**numbers), **known)
    places = [text.find(x) for x in words]
    assert places[0] == 0 and -1 not in places and places == sorted(places)


def by_a_norm(w):
    return 1 + jnp.float32(jnp.max(half(w) / jnp.linalg.norm(half(w))))


def by_a_count(w):
    return 1 + jnp.float32(jnp.max(half(w) / jnp.sum(jnp.ones(70_000, jnp.float16))))


@pytest.mark.parametrize("loss", [by_a_norm, by_a_count])
def test_message_says_that_an_infinite_divisor_makes_gradients_zero(loss):
    state, w = DEFAULT.init(), np.full(8, 300.0, np.float32)
    value, grads = value_and_grad(loss, state, w)
    assert not np.any(grads)
    assert INFINITE in message(state, grads=grads, value=value)


def test_message_names_what_is_not_finite_in_the_optimizer_state(around):
    state, errors = ls.WithLossScalingState(STOPPED, {"mu": {"b": BAD, "w": ONE}}), []
    options = {"max_consecutive_skips": 2, "on_error": errors.append}
    around(lambda state: ls.check_loss_scale(state, **options))(state)
    jax.effects_barrier()
    named = "Not finite in the optimizer state: .inner_state['mu']['b']. https"
    assert named in " ".join(str(*errors).splitlines())


@pytest.mark.parametrize("numbers", [{}, SHARE], ids=["in a row", "share"])
@pytest.mark.parametrize("value", [None, ONE, NAN])
@pytest.mark.parametrize("grads", [None, BAD, np.float32([1.0, 1e5])])
def test_message_blames_no_scale_that_is_fixed_at_1(grads, value, numbers):
    text = message(stopped(UNIT)._replace(**numbers), grads=grads, value=value)
    words = "65504|float16|scale and|scale grow|underflow|overflow|built"
    assert not re.search(words, text)
    assert grads is None or re.search(r" zero +max \|g\| ", text)


def test_error_ends_with_a_report_of_the_gradients():
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(STOPPED, max_consecutive_skips=2, grads=[BAD] * 6)
    shown = str(error.value).partition("\nThe last gradients:\n")[2]
    report = ls.gradient_report([BAD] * 6, loss_scale=STOPPED.loss_scale)
    assert shown == ls.format_report(report, limit=5)


def test_message_has_lines_of_80_columns_and_an_address():
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(STOPPED, max_consecutive_skips=2)
    *lines, address = str(error.value).splitlines()
    assert [x.split()[0] for x in lines[:3]] == ["The", "Loss", "Likely"]
    assert all(len(line) <= 80 for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    book = project["urls"]["Documentation"].removesuffix("index.md")
    assert re.fullmatch(rf"{book}troubleshooting\.md#\S+", address)


def test_pages_and_headings_that_texts_lead_to_exist():
    """Also those of other warnings."""
    sources = [x.read_text() for x in (ROOT / "optax_lossscale").rglob("*.py")]
    places = re.findall(r'"([\w/]+\.md)(?:#([\w-]+))?"', "".join(sources))
    assert len(places) > 10
    for file, heading in places:
        assert heading in ["", *headings((PAGES / file).read_text())]
