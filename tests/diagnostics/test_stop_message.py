"""The message of the guard, about programs that have the fault it names."""

import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from book import PAGES, headings, page
from shared import ROOT
from training import normal, run_rule

import optax_lossscale as ls
from optax_lossscale._diagnostics import stop_message
from optax_lossscale._validation import BOOK

DATA, FORWARD = "the batch, the parameters", "an activation is above 65504"
LOW, HIGH = "overflow at this scale and above", "the scale is too high, if it is fixed"
DERIVATIVE, EMPTY = "has an infinite derivative at 0", "a mean over nothing is 0/0"
OVERFLOW = "or the gradients overflow. "
LAYER, OLD_STATE = "one layer overflows in the backward", "was built once, from an earl"
LABEL, MASKED = "a label is out of range", "a mask multiplies inf by 0"
LOSS, VALUE = "the loss itself is above 65504", "the `value` that `update` got"
DIVERGES = "training diverges (clip"
FLAG, RESULTS = "`grads_finite` is the wrong way round", "with `check_updates=True`"

DEFAULT, UNIT = ls.DynamicLossScale(), ls.FixedLossScale(1.0)
W, X, NO_ROW = normal(8, 8), normal(64, 8), np.zeros(64, bool)
ONE, NAN = np.float32(1.0), np.float32(np.nan)


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


def mean_of_rows(w, mask):
    return jnp.sum(jnp.where(mask, X @ w[0], 0)) / jnp.sum(mask)


def mean_of_rows_or_0(w, mask):
    return jnp.sum(jnp.where(mask, X @ w[0], 0)) / jnp.maximum(jnp.sum(mask), 1)


def mean_of_tokens(w, tokens):
    return jnp.sum(w) / jnp.float32(tokens.sum())


def mean_of_masked_rows(w, mask):
    return jnp.sum(X @ w[0] * mask) / jnp.sum(mask)


def label_out_of_range(w, label):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(X @ w, jnp.full(64, label)).mean()


def masked_classes(w, weights):
    logs = jax.nn.log_softmax(jnp.where(jnp.arange(8) < 5, X @ w, -jnp.inf))
    return -jnp.mean(weights * logs)


def square_in_float16(w, x):
    return jnp.mean(jnp.float32(jnp.square(half(w))))


@pytest.mark.parametrize(
    ("loss_fn", "w", "x", "rule", "cause"),
    [
        (mean_square, W, X * NAN, DEFAULT, DATA),
        (mean_square, 1e6 * W, X, DEFAULT, FORWARD),
        (mean_of_masked_rows, W, NO_ROW, DEFAULT, EMPTY),
        (mean_of_rows, W, NO_ROW, DEFAULT, EMPTY),
        (label_out_of_range, W, np.int32(-100), DEFAULT, LABEL),
        (masked_classes, W, np.float32(np.arange(8) == 0), DEFAULT, MASKED),
        (square_in_float16, 300 * W, X, ls.DynamicLossScale(1.0), LOSS),
        (sum_of_rows, W, X, ls.DynamicLossScale(1.0, min_scale=1.0), LOW),
        (sum_of_rows, W, X, ls.DynamicLossScale(2.0**-14), LOW),
        (mean_square, W, X, ls.FixedLossScale(2.0**24), HIGH),
        # Behind a float16 product, gradients that overflow are NaN.
        (ls.autocast(two_layers), W, X, ls.FixedLossScale(2.0**26), HIGH),
        (lambda w, x: jnp.linalg.norm(w @ x[0]), 0 * W, X, DEFAULT, DERIVATIVE),
        (lambda w, x: jnp.sqrt(w[0, 0]), 0 * W, X, DEFAULT, DERIVATIVE),
        (layer_norm, W**0, X, DEFAULT, LAYER),
        # Without a scale, no scale and no float16 is to blame.
        (wide_square, W, X * NAN, UNIT, DATA),
        (wide_square, 1e30 * W, X, UNIT, DIVERGES),
        (mean_of_rows, W, NO_ROW, UNIT, EMPTY),
        (label_out_of_range, W, np.int32(-100), UNIT, LABEL),
        (lambda w, x: jnp.linalg.norm(w @ x[0]), 0 * W, X, UNIT, DERIVATIVE),
        (lambda w, x: jnp.sqrt(w[0, 0]), 0 * W, X, UNIT, DERIVATIVE),
    ],
)
def test_the_cause_of_a_fault_in_the_loss_is_named(loss_fn, w, x, rule, cause):
    text, grads, _ = stopped(loss_fn, w, x, rule)
    assert cause in text
    # A text is about the loss and the gradients that there are.
    if rule is not UNIT:
        assert (LOSS in text) == bool(ls.all_finite(grads))


def test_gradients_behind_a_float16_product_overflow_to_nan():
    loss_fn, rule = ls.autocast(two_layers), ls.FixedLossScale(2.0**26)
    _, grads, value = stopped(loss_fn, W, X, rule)
    assert np.isfinite(value) and np.isnan(grads).any()


def test_a_gradient_function_that_was_built_once_is_named():
    tx = ls.with_loss_scaling(optax.sgd(0.1), ls.DynamicLossScale(2.0**24))
    opt_state = tx.init(W)
    built_once = ls.value_and_grad(mean_square, opt_state)
    for _ in range(3):
        loss, grads = built_once(W, X)
        opt_state = tx.update(grads, opt_state, W)[1]
    assert OLD_STATE in message(opt_state, grads=grads, value=loss)


@pytest.mark.parametrize(
    ("optimizer", "checks", "extra_args", "cause"),
    [
        (optax.identity(), False, {"value": NAN}, VALUE),
        (optax.identity(), False, {"grads_finite": False}, FLAG),
        (optax.scale(3e38), True, {}, RESULTS),
    ],
)
def test_the_cause_of_a_skip_with_finite_gradients_is_named(
    optimizer, checks, extra_args, cause
):
    tx = ls.with_loss_scaling(optimizer, UNIT, check_updates=checks)
    text, grads, _ = stopped(mean_square, 100 * W, X, tx=tx, **extra_args)
    assert ls.all_finite(grads) and cause in text


@pytest.mark.parametrize(
    ("loss_fn", "x", "cause"),
    [
        (lambda w, x: mean_square(jax.lax.stop_gradient(w), x), X, "does not reach"),
        (mean_of_rows_or_0, NO_ROW, "no label of the batch counts"),
        (mean_of_tokens, np.ones(70_000, np.float16), "the count that a mean divides"),
        (lambda w, x: 1e-9 * mean_square(w, x), X, "the scale is too low"),
    ],
)
def test_the_cause_of_gradients_of_zero_is_named(loss_fn, x, cause):
    grads = jax.jit(jax.grad(loss_fn))(W, x)
    with pytest.warns(UserWarning, match="All gradients are exactly 0") as told:
        ls.check_loss_scale(DEFAULT.init(), grads=grads)
    assert cause in " ".join(str(told[0].message).split())


def stopped(loss_fn, w, x, rule=UNIT, tx=None, **extra_args):
    """The error after three steps, all skipped, and their gradients and loss."""
    tx = tx or ls.with_loss_scaling(optax.sgd(0.1), rule)

    @jax.jit
    def step(opt_state, w):
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(w, x)
        extra = {"value": loss} | extra_args
        return tx.update(grads, opt_state, w, **extra)[1], grads, loss

    opt_state = tx.init(w)
    for _ in range(3):
        opt_state, grads, loss = step(opt_state, w)
    return message(opt_state, grads=grads, value=loss), grads, loss


def message(state, **arguments):
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return " ".join(str(error.value).splitlines())


STOPPED = jax.tree.map(lambda x: x[-1], run_rule(DEFAULT, [False] * 3))
BAD = np.float32([1.0, np.nan])


@pytest.mark.parametrize(
    ("arguments", "causes"),
    [
        ({}, [DATA, FORWARD, OVERFLOW, "Pass `grads=grads` and"]),
        ({"grads": BAD}, [DATA, FORWARD, OVERFLOW, "Pass `grads=grads` and"]),
        ({"value": ONE}, [HIGH, DERIVATIVE, OLD_STATE, LAYER]),
        ({"value": NAN}, [DATA, FORWARD, EMPTY]),
    ],
)
def test_of_what_is_unknown_more_causes_are_named(arguments, causes):
    places = [message(STOPPED, **arguments).find(cause) for cause in causes]
    assert -1 not in places and places == sorted(places)


UNSCALED = run_rule(UNIT, [False] * 3)
RATE = {"consecutive_skips": 1, "skip_rate": np.float32(0.3)}
SCALED_WORDS = re.compile("65504|float16|scale and|scale grow|underflow|overflow|built")


@pytest.mark.parametrize("numbers", [{}, RATE], ids=["in a row", "share"])
@pytest.mark.parametrize("value", [None, ONE, NAN])
@pytest.mark.parametrize("grads", [None, BAD, np.float32([1.0, 1e5])])
def test_a_scale_fixed_at_1_is_not_blamed(grads, value, numbers):
    state = jax.tree.map(lambda x: x[-1], UNSCALED)._replace(**numbers)
    text = message(state, grads=grads, value=value)
    assert not SCALED_WORDS.search(text)
    assert grads is None or re.search(r" zero +max \|g\| ", text)


def test_a_message_has_the_event_its_causes_one_page_and_the_report():
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(STOPPED, max_consecutive_skips=2, grads=[BAD] * 6)
    text, _, shown = str(error.value).partition("\nThe last gradients:\n")
    report = ls.gradient_report([BAD] * 6, loss_scale=STOPPED.loss_scale)
    assert shown == ls.format_report(report, limit=5)
    *lines, address = text.splitlines()
    assert lines[0].startswith("The last 3 steps were all skipped, more than `max_con")
    assert lines[1] == "Loss scale: 4096. Skipped in all: 3."
    assert lines[2].startswith("Likely causes: the batch, the parameters or a carried")
    assert all(len(line) <= 80 for line in lines)
    assert re.fullmatch(r"https://\S+/troubleshooting\.md#\S+", address)


def test_every_text_leads_to_a_page_and_heading_that_exist():
    """Those of the guard, and those of other warnings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Documentation"] == f"{BOOK}index.md"
    sources = [x.read_text() for x in (ROOT / "optax_lossscale").rglob("*.py")]
    places = re.findall(r'"([\w/]+\.md)(?:#([\w-]+))?"', "".join(sources))
    assert len(places) > 10
    for file, heading in places:
        assert heading in ["", *headings((PAGES / file).read_text())]


def test_page_has_the_sentences_that_one_searches_for():
    text = page("troubleshooting")
    assert all(sentence in text for sentence in stop_message.WARNINGS.values())


def test_message_of_a_share_of_skips_names_the_batches():
    states = run_rule(DEFAULT, np.arange(200) % 2 == 0)
    text = message(jax.tree.map(lambda x: x[-1], states))
    assert text.startswith("Recently, 44% of the steps were skipped. Loss scale: ")
    assert "some batches hold NaN" in text and "raise `growth_interval`" in text


def test_message_of_an_ensemble_names_one_member():
    states = jax.tree.map(lambda x: np.full((2, 2), x), ls.HeadroomLossScale().init())
    skips, scales = np.int32([[0, 4], [7, 1]]), np.float32([[1.0, 2.0], [4.0, 8.0]])
    text = message(states._replace(consecutive_skips=skips, loss_scale=scales))
    assert text.startswith("The last 4 steps of member 0, 1 were all skipped, more")
    assert " Loss scale: 2. Skipped in all: 0. " in text
