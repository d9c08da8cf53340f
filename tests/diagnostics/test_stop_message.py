"""The message of the guard names the fault that a program has, and the way out."""

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
from training import normal, run_rule

import optax_lossscale as ls

DATA, FORWARD = "the batch, the parameters", "an activation is above 65504"
LOW, HIGH = "overflow at this scale and above", "the scale is too high, if it is fixed"
DERIVATIVE, EMPTY = "has an infinite derivative at 0", "a mean over nothing is 0/0"
OVERFLOW, MORE = "or the gradients overflow. ", "Pass `grads=grads` and"
LAYER, OLD_STATE = "one layer overflows in the backward", "was built once, from an earl"
LABEL, MASKED = "a label is out of range", "a mask multiplies inf by 0"
LOSS, VALUE = "the loss itself is above 65504", "the `value` that `update` got"
FLAG, RESULTS = "`grads_finite` is the wrong way round", "with `check_updates=True`"
DIVERGES, BATCHES = "training diverges (clip", "some batches hold NaN"

DEFAULT, UNIT = ls.DynamicLossScale(), ls.FixedLossScale(1.0)
BRAVE, BOLD = ls.FixedLossScale(2.0**24), ls.FixedLossScale(2.0**26)
ONES = ls.DynamicLossScale(1.0, min_scale=1.0)
W, X, NO_ROW = normal(8, 8), normal(64, 8), np.zeros(64, bool)
ONE, NAN, BAD = np.float32(1.0), np.float32(np.nan), np.float32([1.0, np.nan])
COUNTED, FIRST_CLASS = np.int32(-100), np.float32(np.arange(8) == 0)


def half(x):
    return x.astype(jnp.float16)


def mean_square(w, x):
    """Of a layer in float16. The rest is float32."""
    return jnp.mean(jnp.float32(half(x) @ half(w)) ** 2)


def sum_of_rows(w, x):
    return 1e9 * jnp.sum(jnp.float32(half(x) @ half(w)))


def wide_square(w, x):
    return jnp.mean((x @ w) ** 2)


def two_layers(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def layer_norm(w, x):
    """Of equal numbers: the derivative of the root of ``eps`` overflows in float16."""
    x = half(w[0]) - half(w[0].mean())
    x = x / jnp.sqrt((x**2).mean() + jnp.float16(6e-5))
    return jnp.float32(x) @ jnp.arange(8.0)


def mean_of_rows(w, mask, least=0):
    return jnp.sum(jnp.where(mask, X @ w[0], 0)) / jnp.maximum(jnp.sum(mask), least)


def mean_of_masked_rows(w, mask):
    return jnp.sum(X @ w[0] * mask) / jnp.sum(mask)


def mean_of_tokens(w, tokens):
    return jnp.sum(w) / jnp.float32(tokens.sum())


def label_loss(w, label):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(X @ w, jnp.full(64, label)).mean()


def masked_classes(w, weights):
    logs = jax.nn.log_softmax(jnp.where(jnp.arange(8) < 5, X @ w, -jnp.inf))
    return -jnp.mean(weights * logs)


def square_in_float16(w, x):
    return jnp.mean(jnp.float32(jnp.square(half(w))))


def norm(w, x):
    return jnp.linalg.norm(w @ x[0])


def root(w, x):
    return jnp.sqrt(w[0, 0])


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
    (mean_square, W, X * NAN, DEFAULT, DATA),
    (mean_square, 1e6 * W, X, DEFAULT, FORWARD),
    (mean_of_masked_rows, W, NO_ROW, DEFAULT, EMPTY),
    (mean_of_rows, W, NO_ROW, DEFAULT, EMPTY),
    (label_loss, W, COUNTED, DEFAULT, LABEL),
    (masked_classes, W, FIRST_CLASS, DEFAULT, MASKED),
    (square_in_float16, 300 * W, X, ls.DynamicLossScale(1.0), LOSS),
    (sum_of_rows, W, X, ONES, LOW),
    (sum_of_rows, W, X, ls.DynamicLossScale(2.0**-14), LOW),
    (mean_square, W, X, BRAVE, HIGH),
    # Behind a float16 product, gradients that overflow are NaN.
    (ls.autocast(two_layers), W, X, BOLD, HIGH),
    (norm, 0 * W, X, DEFAULT, DERIVATIVE),
    (root, 0 * W, X, DEFAULT, DERIVATIVE),
    (layer_norm, W**0, X, DEFAULT, LAYER),
    # Without a scale, no scale and no float16 is to blame.
    (wide_square, W, X * NAN, UNIT, DATA),
    (wide_square, 1e30 * W, X, UNIT, DIVERGES),
    (mean_of_rows, W, NO_ROW, UNIT, EMPTY),
    (label_loss, W, COUNTED, UNIT, LABEL),
    (norm, 0 * W, X, UNIT, DERIVATIVE),
    (root, 0 * W, X, UNIT, DERIVATIVE),
]


@pytest.mark.parametrize(("loss_fn", "w", "x", "rule", "cause"), FAULTS)
def test_message_names_the_fault_of_the_loss(loss_fn, w, x, rule, cause):
    text, grads = stopped(loss_fn, w, x, rule)
    assert cause in text
    # A text is about the loss and the gradients that there are.
    if rule is not UNIT:
        assert (LOSS in text) == bool(ls.all_finite(grads))
    assert rule is not BOLD or np.isnan(grads).any()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"value": NAN}, VALUE),
        ({"grads_finite": False}, FLAG),
        ({"checks": True, "optimizer": optax.scale(3e38)}, RESULTS),
    ],
)
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


@pytest.mark.parametrize(
    ("loss_fn", "x", "cause"),
    [
        (lambda w, x: mean_square(jax.lax.stop_gradient(w), x), X, "does not reach"),
        (functools.partial(mean_of_rows, least=1), NO_ROW, "no label of the batch"),
        (mean_of_tokens, np.ones(70_000, np.float16), "the count that a mean divides"),
        (lambda w, x: 1e-9 * mean_square(w, x), X, "the scale is too low"),
    ],
)
def test_warning_names_the_cause_of_zeros(loss_fn, x, cause):
    text = message(DEFAULT.init(), grads=jax.jit(jax.grad(loss_fn))(W, x))
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
