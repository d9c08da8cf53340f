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
from shared import ROOT, slow_but
from training import normal

import optax_lossscale as ls

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


HIGH_RULE = ls.FixedLossScale(2.0**24)
FAULTS = {
    "NaN in the batch": ("float16", W, X * NAN, DEFAULT, "argument"),
    "large activations": ("float16", 1e4 * W, 30 * X, DEFAULT, "dot_general"),
    "mean over nothing": ("mean", W, NO_ROW, DEFAULT, "div"),
    "label out of range": ("label", W, COUNTED, DEFAULT, "gather"),
    "inf times 0": ("classes", W, FIRST_CLASS, DEFAULT, "constant -inf"),
    "large float16 loss": ("float16 loss", 300 * W, X, DEFAULT, "integer_pow|square"),
    "high scale": ("float16", W, X, HIGH_RULE, "dot_general|convert_element_type"),
    "norm of 0": ("norm", 0 * W, X, DEFAULT, "div"),
    "root of 0": ("root", 0 * W, X, DEFAULT, "div"),
    "clip after exp": ("k3", W, X, DEFAULT, "exp"),
    "divergence": ("float32", 1e30 * W, X, UNIT, "integer_pow|square"),
}


QUICK = "large activations", "root of 0", "high scale", "divergence"


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_call_that_the_message_shows_finds_the_fault(name):
    loss, w, x, rule, operations = FAULTS[name]

    def train_step(params, opt_state, batch):
        value, grads = ls.value_and_grad(LOSSES[loss], opt_state)(params, batch)
        return rule.update(opt_state, ls.all_finite((value, grads)))

    report = ls.nonfinite_report(train_step, w, rule.init(), x)
    assert report[0].operation in operations.split("|")


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(loss, state, *args):
    return ls.value_and_grad(loss, state)(*args)


STOPPED, APPLIED = stopped(DEFAULT), {"consecutive_skips": 0}
SHARE = {"consecutive_skips": 1, "skip_rate": 0.3}
NUMBERS = " Loss scale: 32768. Skipped in all: 3. "
CALL = "`ls.nonfinite_report(train_step, params, opt_state, batch)` names"
ROW = "The last 3 steps were all skipped, more than `max_consecutive_skips`=2."
SHARES = "Recently, 30% of the steps were skipped."
UNSCALED = APPLIED | {"loss_scale": 1.0, "is_fixed": True}
OFTEN = UNSCALED | {"skip_rate": 0.06, "skipped_steps": 61}
SIXTY, LIMIT = {"consecutive_skips": 60}, {"max_consecutive_skips": 100}
FIXED, LONG = {"is_fixed": True, "skip_rate": 0.45}, "More than 50 steps in a row"
SIXTY, LIMIT = {"consecutive_skips": 60}, {"max_consecutive_skips": 100}
FIXED, LONG = (
    {"is_fixed": True, "skip_rate": 0.45},
    "More than 50 steps in a row were skipped. ",
)
TOP = APPLIED | {"loss_scale": 2.0**24, "growth_tracker": 500, "skipped_steps": 0}
ZEROS = ["All gradients are exactly 0. Either", "does not reach", "no label of"]
INVALID, UNDONE = "The loss scale is not a", "The gradients or the loss are not finite"
INFINITE = "a divisor is inf (a count or a norm)"
# What differs in the state; what is known; the words, in their order.
KNOWN = {
    "nothing": ({}, {}, [ROW + NUMBERS + CALL]),
    "60 of 60": (SIXTY, LIMIT, [LONG, CALL]),
    "60 of 60, fixed": (SIXTY | FIXED, LIMIT, ["Recently, 45%", CALL]),
    "bad gradients": ({}, {"grads": BAD}, [ROW + NUMBERS + CALL, "nan"]),
    "finite loss": ({}, {"value": ONE}, [ROW, "loss of this step: 1. " + CALL]),
    "bad loss": ({}, {"value": NAN}, [ROW, "loss of this step: nan. " + CALL]),
    "high rate": (SHARE, {}, [SHARES + NUMBERS + CALL]),
    "scale of NaN": ({"loss_scale": NAN}, {}, [INVALID, "restored from a", "Set a"]),
    "bad gradients, applied": (APPLIED, {"grads": BAD}, [UNDONE, "`value=loss`"]),
    "zeros": (APPLIED, {"grads": 0 * ONE}, [*ZEROS, INFINITE]),
    "zeros, unscaled": (UNSCALED, {"grads": 0 * ONE}, [*ZEROS, "in float16"]),
    "2**24": (TOP, {}, ["The loss scale is 2**24 or more. None", "jax.value_and_grad"]),
    "often, unscaled": (OFTEN, {}, ["More than 5%", CALL]),
}


@pytest.mark.parametrize(("numbers", "known", "words"), KNOWN.values(), ids=KNOWN)
def test_message_begins_with_the_event_and_the_numbers_before_what_to_do(
    numbers, known, words
):
    text = message(STOPPED._replace(**numbers), **known)
    places = [text.lower().find(x.lower()) for x in words]
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
    named = "Not finite in the optimizer state: .inner_state['mu']['b']. `ls."
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
    assert [x.split()[0] for x in lines[:3]] == ["The", "Loss", CALL.split()[0]]
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
