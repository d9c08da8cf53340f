"""The message of the guards."""

import re
import tomllib

import jax
import numpy as np
import pytest
from book import PAGES, headings, page
from shared import ROOT
from training import run_rule

import optax_lossscale as ls
from optax_lossscale._diagnostics import stop_message

# Each cause begins with three words of its own.
FORWARD, LAYER, DATA = "The forward pass", "The backward pass", "The batch or"
TOO_HIGH, OLD_STATE = "The scale is", "The gradient function"
OUTSIDE, RESULTS = "A wrapper outside", "If you use"
LABEL, MASKED, FLAG = "A label is", "A mask multiplies", "If you pass"
UNREACHED, COUNT = "The loss does", "A mean divides"
FLUSHED = "All gradients underflow"
BATCHES, GROWS, FLOOR = "Some batches hold", "The scale grows", "The gradients overflow"
DERIVATIVE, EMPTY = "The derivative of", "A mean over"


def message(state, **arguments):
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return str(error.value)


def causes(text):
    """The causes that a message names, in its order."""
    return re.findall(r"^\d\. (\S+ \S+ \S+)", text, re.M)


def test_message_tells_what_happened_then_likely_causes():
    numbers = {"loss_scale": 1.0, "consecutive_skips": 3, "skipped_steps": 4}
    state = ls.DynamicLossScale().init()._replace(**numbers)
    grads = [np.float32([1.0, np.nan])] * 6
    report = ls.gradient_report(grads, loss_scale=state.loss_scale)
    text, _, shown = message(state, grads=grads).partition("\nThe last gradients:\n")
    assert shown == ls.format_report(report, limit=5)
    what, numbers, cause, *_ = lines = text.splitlines()
    assert what.startswith("The last 3 steps were all skipped, more than `max_cons")
    assert numbers == "Loss scale: 1. Skipped in all: 4."
    assert cause.startswith(f"1. {DATA}")
    assert all(len(line) <= 80 or line.startswith("   https:") for line in lines)


def test_every_cause_leads_to_a_page_and_heading_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    book = project["urls"]["Documentation"].removesuffix("index.md")
    texts = [str(x) for x in vars(stop_message).values() if isinstance(x, str | tuple)]
    addresses = {*re.findall(r"https:\S+", "\n".join(texts))} - {book}
    assert len(addresses) > 10
    for address in addresses:
        file, _, heading = address.removeprefix(book).partition("#")
        assert heading in ["", *headings((PAGES / file).read_text())]


def test_page_has_the_sentences_that_one_searches_for():
    sentences = [*stop_message.WARNINGS.values(), DERIVATIVE, EMPTY, FLOOR, LABEL]
    assert all(sentence in page("troubleshooting") for sentence in sentences)


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
        (1.0, INF, 1.0, [FLOOR, LAYER, OLD_STATE]),
        (2.0**9, INF, None, [TOO_HIGH, LAYER, OLD_STATE]),
        (1.0, NAN, 1.0, [DERIVATIVE, EMPTY, LAYER]),
        (2.0**9, NAN, 1.0, [TOO_HIGH, DERIVATIVE, EMPTY]),
        *((1.0, FINITE, value, [RESULTS, FLAG, OUTSIDE]) for value in (None, 1.0)),
    ],
)
def test_the_causes_fit_the_scale_the_gradients_and_the_loss(
    scale, grads, value, expected
):
    counters = {"consecutive_skips": 200, "skipped_steps": 200}
    state = ls.DynamicLossScale().init()._replace(loss_scale=scale, **counters)
    assert causes(message(state, grads=grads, value=value)) == expected


def test_message_of_a_share_of_skips_names_the_batches():
    state = run_rule(ls.DynamicLossScale(), np.arange(200) % 2 == 0)
    text = message(jax.tree.map(lambda x: x[-1], state))
    assert text.startswith("Of late, 44% of the steps were skipped.\n")
    assert causes(text) == [BATCHES, FORWARD, GROWS]


def test_message_of_an_ensemble_names_one_member():
    states = jax.tree.map(lambda x: np.full((2, 2), x), ls.HeadroomLossScale().init())
    skips, scales = np.int32([[0, 4], [7, 1]]), np.float32([[1.0, 2.0], [4.0, 8.0]])
    text = message(states._replace(consecutive_skips=skips, loss_scale=scales))
    assert text.startswith("The last 4 steps of member 0, 1 were all skipped, more")
    assert "\nLoss scale: 2. Skipped in all: 0.\n" in text
