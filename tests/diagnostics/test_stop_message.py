"""The message of the guards."""

import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from book import PAGES, headings, page
from shared import ROOT
from training import normal, run_rule

import optax_lossscale as ls
from optax_lossscale._diagnostics import stop_message

# What each cause begins with.
FORWARD, LAYER, DATA = "an activation is", "a layer overflows", "the batch, the param"
TOO_HIGH, OLD_STATE = "the scale is too high", "the gradient function was"
RESULTS, FLAG = "with `check_updates=True`", "`grads_finite` is the wrong"
LABEL, MASKED = "a label is out of range", "a mask multiplies"
BATCHES, GROWS, FLOOR = "some batches hold", "the scale grows too", "the gradients over"
DERIVATIVE, EMPTY = "`sqrt`, a norm or `log`", "a mean over nothing"


def message(state, **arguments):
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return str(error.value)


def causes(text):
    """The causes that a message names, in its order."""
    [listed] = re.findall(r"Likely causes: (.*?)\.\nhttps:", text, re.S)
    return re.split(r"; (?=[^)]*(?:\(|$))", listed.replace("\n", " "))


def test_message_tells_what_happened_then_likely_causes():
    numbers = {"loss_scale": 1.0, "consecutive_skips": 3, "skipped_steps": 4}
    state = ls.DynamicLossScale().init()._replace(**numbers)
    grads = [np.float32([1.0, np.nan])] * 6
    report = ls.gradient_report(grads, loss_scale=state.loss_scale)
    text, _, shown = message(state, grads=grads).partition("\nThe last gradients:\n")
    assert shown == ls.format_report(report, limit=5)
    what, numbers, first, *_ = lines = text.splitlines()
    assert what.startswith("The last 3 steps were all skipped, more than `max_cons")
    assert numbers == "Loss scale: 1. Skipped in all: 4."
    assert first.startswith(f"Likely causes: {DATA}")
    assert all(len(line) <= 80 for line in lines[:-1])
    assert re.fullmatch(r"https://\S+/troubleshooting\.md#\S+", lines[-1])


def test_every_event_leads_to_a_page_and_heading_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    book = project["urls"]["Documentation"].removesuffix("index.md")
    assert book == stop_message.BOOK
    for *_, place in stop_message._CAUSES.values():
        file, _, heading = place.partition("#")
        assert heading in headings((PAGES / file).read_text())


def test_page_has_the_sentences_that_one_searches_for():
    text = page("troubleshooting")
    assert all(sentence in text for sentence in stop_message.WARNINGS.values())


FINITE, NAN, INF = ([np.ones(2), np.full(2, x)] for x in (1.0, np.nan, np.inf))


@pytest.mark.parametrize(
    ("scale", "grads", "value", "expected"),
    [
        (1.0, None, None, [DATA, FORWARD, FLOOR]),
        (2.0**9, None, None, [DATA, FORWARD, TOO_HIGH]),
        (1.0, NAN, None, [DATA, FORWARD, FLOOR]),
        # A loss that is not finite is a fault of the forward pass, a finite one is not.
        *((1.0, grads, np.nan, [DATA, FORWARD, EMPTY]) for grads in (None, NAN)),
        (1.0, FINITE, np.nan, [LABEL, MASKED, DATA]),
        (1.0, None, 1.0, [FLOOR, LAYER, OLD_STATE]),
        (2.0**-14, INF, 1.0, [FLOOR, LAYER, OLD_STATE]),
        (2.0**9, INF, None, [TOO_HIGH, LAYER, OLD_STATE]),
        (1.0, NAN, 1.0, [DERIVATIVE, FLOOR, EMPTY, LAYER, OLD_STATE]),
        (2.0**9, NAN, 1.0, [DERIVATIVE, TOO_HIGH, EMPTY, LAYER, OLD_STATE]),
        *((1.0, FINITE, value, [RESULTS, FLAG]) for value in (None, 1.0)),
    ],
)
def test_the_causes_fit_the_scale_the_gradients_and_the_loss(
    scale, grads, value, expected
):
    counters = {"consecutive_skips": 200, "skipped_steps": 200}
    state = ls.DynamicLossScale().init()._replace(loss_scale=scale, **counters)
    found = causes(message(state, grads=grads, value=value))
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_gradients_behind_a_float16_product_overflow_to_nan():
    """The causes are those of inf, and more."""

    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    w, x = normal(8, 8), normal(64, 8)
    rule = ls.FixedLossScale(2.0**26)
    state = rule.init()
    value, grads = jax.jit(ls.value_and_grad(ls.autocast(loss_fn), state))(w, x)
    assert np.isfinite(value) and np.isnan(grads).any()
    state = run_rule(rule, [False] * 3)
    text = message(jax.tree.map(lambda x: x[-1], state), grads=grads, value=value)
    assert causes(text)[1].startswith(TOO_HIGH)


def test_message_of_a_share_of_skips_names_the_batches():
    state = run_rule(ls.DynamicLossScale(), np.arange(200) % 2 == 0)
    text = message(jax.tree.map(lambda x: x[-1], state))
    assert text.startswith("Recently, 44% of the steps were skipped.\n")
    assert all(map(str.startswith, causes(text), [BATCHES, FORWARD, GROWS]))


def test_message_of_an_ensemble_names_one_member():
    states = jax.tree.map(lambda x: np.full((2, 2), x), ls.HeadroomLossScale().init())
    skips, scales = np.int32([[0, 4], [7, 1]]), np.float32([[1.0, 2.0], [4.0, 8.0]])
    text = message(states._replace(consecutive_skips=skips, loss_scale=scales))
    assert text.startswith("The last 4 steps of member 0, 1 were all skipped, more")
    assert "\nLoss scale: 2. Skipped in all: 0.\n" in text
