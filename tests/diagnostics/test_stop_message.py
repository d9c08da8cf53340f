"""The message of the guard names the fault that a program has, and the way out."""

import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from book import PAGES, headings
from shared import ROOT
from training import normal, run_rule

import optax_lossscale as ls

DATA, FORWARD = "the batch, the parameters", "an activation is above 65504"
LOW, HIGH = "overflow at this scale and above", "the scale is too high, if it is fixed"
DERIVATIVE, EMPTY = "has an infinite derivative at 0", "a mean over nothing is 0/0"
OVERFLOW, MORE = "or the gradients overflow. ", "Pass `grads=grads` and"
LAYER, OLD_STATE = "one layer overflows in the backward", "was built once, from an earl"
LABEL, BATCHES = "a label is out of range", "some batches hold NaN"
LOSS = "the loss itself is above 65504"

DEFAULT, ONES = ls.DynamicLossScale(), ls.DynamicLossScale(1.0, min_scale=1.0)
UNIT, BRAVE, BOLD = map(ls.FixedLossScale, (1.0, 2.0**24, 2.0**26))
W, X, NO_ROW = normal(8, 8), normal(64, 8), np.zeros(64, bool)
ONE, NAN, BAD = np.float32(1.0), np.float32(np.nan), np.float32([1.0, np.nan])
COUNTED, FIRST_CLASS = np.int32(-100), np.float32(np.arange(8) == 0)


def half(x):
    return x.astype(jnp.float16)


def mean_square(w, x):
    """Of a layer in float16. The rest is float32."""
    return jnp.mean(jnp.float32(half(x) @ half(w)) ** 2)


def layer_norm(w, x):
    """Of equal numbers: the derivative of the root of ``eps`` overflows in float16."""
    x = half(w[0]) - half(w[0].mean())
    x = x / jnp.sqrt((x**2).mean() + jnp.float16(6e-5))
    return jnp.float32(x) @ jnp.arange(8.0)


def label_loss(w, label):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(X @ w, jnp.full(64, label)).mean()


def masked_classes(w, weights):
    logs = jax.nn.log_softmax(jnp.where(jnp.arange(8) < 5, X @ w, -jnp.inf))
    return -jnp.mean(weights * logs)


def sum_where(w, mask):
    return jnp.sum(jnp.where(mask, X @ w[0], 0))


LOSSES = {
    "float16": mean_square,
    "float32": lambda w, x: jnp.mean((x @ w) ** 2),
    "float16 loss": lambda w, x: jnp.mean(jnp.float32(jnp.square(half(w)))),
    "sum": lambda w, x: 1e9 * jnp.sum(jnp.float32(half(x) @ half(w))),
    "autocast": ls.autocast(lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)),
    "layer norm": layer_norm,
    "norm": lambda w, x: jnp.linalg.norm(w @ x[0]),
    "root": lambda w, x: jnp.sqrt(w[0, 0]),
    "mean": lambda w, mask: sum_where(w, mask) / jnp.sum(mask),
    "masked mean": lambda w, mask: jnp.sum(X @ w[0] * mask) / jnp.sum(mask),
    "mean or 0": lambda w, mask: sum_where(w, mask) / jnp.maximum(jnp.sum(mask), 1),
    "float16 count": lambda w, tokens: jnp.sum(w) / jnp.float32(tokens.sum()),
    "label": label_loss,
    "classes": masked_classes,
    "stopped": lambda w, x: mean_square(jax.lax.stop_gradient(w), x),
    "tiny": lambda w, x: 1e-9 * mean_square(w, x),
}


def message(state, **arguments):
    """The error or, as warnings are errors, the warning."""
    with pytest.raises((ls.LossScaleError, UserWarning)) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return " ".join(str(error.value).splitlines())


def stopped(loss_fn, w, x, rule=UNIT, optimizer=None, checks=False, **extra_args):
    """The error after three steps, all skipped, and the gradients of the last."""
    optimizer = optimizer or optax.sgd(0.1)
    tx = ls.with_loss_scaling(optimizer, rule, check_updates=checks)

    @jax.jit
    def step(opt_state, w):
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(w, x)
        extra = {"value": loss} | extra_args
        return tx.update(grads, opt_state, w, **extra)[1], grads, loss

    opt_state = tx.init(w)
    for _ in range(3):
        opt_state, grads, loss = step(opt_state, w)
    return message(opt_state, grads=grads, value=loss), grads


FAULTS = [
    ("float16", W, X * NAN, DEFAULT, DATA),
    ("float16", 1e6 * W, X, DEFAULT, FORWARD),
    ("masked mean", W, NO_ROW, DEFAULT, EMPTY),
    ("mean", W, NO_ROW, DEFAULT, EMPTY),
    ("label", W, COUNTED, DEFAULT, LABEL),
    ("classes", W, FIRST_CLASS, DEFAULT, "a mask multiplies inf by 0"),
    ("float16 loss", 300 * W, X, ls.DynamicLossScale(1.0), LOSS),
    ("sum", W, X, ONES, LOW),
    ("sum", W, X, ls.DynamicLossScale(2.0**-14), LOW),
    ("float16", W, X, BRAVE, HIGH),
    # Behind a float16 product, gradients that overflow are NaN.
    ("autocast", W, X, BOLD, HIGH),
    ("norm", 0 * W, X, DEFAULT, DERIVATIVE),
    ("root", 0 * W, X, DEFAULT, DERIVATIVE),
    ("layer norm", W**0, X, DEFAULT, LAYER),
    # Without a scale, no scale and no float16 is to blame.
    ("float32", W, X * NAN, UNIT, DATA),
    ("float32", 1e30 * W, X, UNIT, "training diverges (clip"),
    ("mean", W, NO_ROW, UNIT, EMPTY),
    ("label", W, COUNTED, UNIT, LABEL),
    ("norm", 0 * W, X, UNIT, DERIVATIVE),
    ("root", 0 * W, X, UNIT, DERIVATIVE),
]


@pytest.mark.parametrize(("loss", "w", "x", "rule", "cause"), FAULTS)
def test_message_names_the_fault_of_the_loss(loss, w, x, rule, cause):
    text, grads = stopped(LOSSES[loss], w, x, rule)
    assert cause in text
    # A text is about the loss and the gradients that there are.
    assert (LOSS in text) == (rule is not UNIT and bool(ls.all_finite(grads)))
    assert rule is not BOLD or np.isnan(grads).any()


SKIPS = [
    ({"value": NAN}, "the `value` that `update` got"),
    ({"grads_finite": False}, "`grads_finite` is the wrong way round"),
    ({"checks": True, "optimizer": optax.scale(3e38)}, "with `check_updates=True`"),
]


@pytest.mark.parametrize(("options", "cause"), SKIPS)
def test_message_names_what_skips_finite_gradients(options, cause):
    text, grads = stopped(mean_square, 100 * W, X, **options)
    assert ls.all_finite(grads) and cause in text


def test_message_names_a_gradient_function_that_was_built_once():
    tx = ls.with_loss_scaling(optax.sgd(0.1), BRAVE)
    opt_state = tx.init(W)
    built_once = ls.value_and_grad(mean_square, opt_state)
    for _ in range(3):
        loss, grads = built_once(W, X)
        opt_state = tx.update(grads, opt_state, W)[1]
    assert OLD_STATE in message(opt_state, grads=grads, value=loss)


ZEROS = [
    ("stopped", X, "does not reach"),
    ("mean or 0", NO_ROW, "no label of the batch"),
    ("float16 count", np.ones(70_000, np.float16), "the count that a mean divides"),
    ("tiny", X, "the scale is too low"),
]


@pytest.mark.parametrize(("loss", "x", "cause"), ZEROS)
def test_warning_names_the_cause_of_zeros(loss, x, cause):
    text = message(DEFAULT.init(), grads=jax.jit(jax.grad(LOSSES[loss]))(W, x))
    assert text.startswith("All gradients are exactly 0") and cause in text


STOPPED = jax.tree.map(lambda x: x[-1], run_rule(DEFAULT, [False] * 3))
UNSCALED = jax.tree.map(lambda x: x[-1], run_rule(UNIT, [False] * 3))
SHARE = {"consecutive_skips": 1, "skip_rate": np.float32(0.3)}
ROW = "The last 3 steps were all skipped, more than `max_consecutive_skips`=2. Loss "
ROW += "scale: 4096. Skipped in all: 3. Likely causes: "
SHARES = "Recently, 30% of the steps were skipped. Loss scale: 4096. Skipped in all: 3."
MEMBERS = {"consecutive_skips": [[0, 4], [7, 1]], "loss_scale": [[1, 2], [4, 8]]}
MEMBER = "The last 4 steps of member 0, 1 were all skipped, more than"
UNIT_ZEROS = {"loss_scale": 1, "is_fixed": True, "consecutive_skips": 0}
UNIT_OFTEN = UNIT_ZEROS | {"skip_rate": 0.06, "skipped_steps": 61}
KNOWN = [
    # What differs in the state; what is known; the words, in their order.
    ({}, {}, [ROW + DATA, FORWARD, OVERFLOW, MORE]),
    ({}, {"grads": BAD}, [ROW + DATA, FORWARD, OVERFLOW, MORE]),
    ({}, {"value": ONE}, [ROW + HIGH, DERIVATIVE, OLD_STATE, LAYER]),
    ({}, {"value": NAN}, [ROW + DATA, FORWARD, EMPTY]),
    (SHARE, {}, [SHARES, BATCHES, FORWARD, "raise `growth_interval`"]),
    (MEMBERS, {}, [MEMBER, " Loss scale: 2. Skipped in all: 3. ", DATA]),
    ({"loss_scale": NAN}, {}, ["The loss scale is not a", "was restored", "set a"]),
    (UNIT_OFTEN, {}, ["More than 5 %", BATCHES, f"{DERIVATIVE}. https"]),
    (UNIT_ZEROS, {"grads": 0 * ONE}, ["All", "reach", "no label of the batch counts."]),
]


@pytest.mark.parametrize(("numbers", "known", "words"), KNOWN)
def test_message_names_more_causes_if_less_is_known(numbers, known, words):
    fields = np.broadcast_arrays(*STOPPED._replace(**numbers)[:7])
    types = [x.dtype for x in STOPPED[:7]]
    text = message(ls.LossScaleState(*map(np.asarray, fields, types)), **known)
    places = [text.find(x) for x in words]
    assert places[0] == 0 and -1 not in places and places == sorted(places)


@pytest.mark.parametrize("numbers", [{}, SHARE], ids=["in a row", "share"])
@pytest.mark.parametrize("value", [None, ONE, NAN])
@pytest.mark.parametrize("grads", [None, BAD, np.float32([1.0, 1e5])])
def test_message_blames_no_scale_that_is_fixed_at_1(grads, value, numbers):
    text = message(UNSCALED._replace(**numbers), grads=grads, value=value)
    words = "65504|float16|scale and|scale grow|underflow|overflow|built"
    assert not re.search(words, text)
    assert grads is None or re.search(r" zero +max \|g\| ", text)


def test_message_has_lines_of_80_columns_an_address_and_the_report():
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(STOPPED, max_consecutive_skips=2, grads=[BAD] * 6)
    text, _, shown = str(error.value).partition("\nThe last gradients:\n")
    report = ls.gradient_report([BAD] * 6, loss_scale=STOPPED.loss_scale)
    assert shown == ls.format_report(report, limit=5)
    *lines, address = text.splitlines()
    assert [x.split()[0] for x in lines[:3]] == ["The", "Loss", "Likely"]
    assert all(len(line) <= 80 for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    book = project["urls"]["Documentation"].removesuffix("index.md")
    assert re.fullmatch(rf"{book}troubleshooting\.md#\S+", address)


def test_every_text_leads_to_a_page_and_heading_that_exist():
    """Those of the guard, and those of other warnings."""
    sources = [x.read_text() for x in (ROOT / "optax_lossscale").rglob("*.py")]
    places = re.findall(r'"([\w/]+\.md)(?:#([\w-]+))?"', "".join(sources))
    assert len(places) > 10
    for file, heading in places:
        assert heading in ["", *headings((PAGES / file).read_text())]
