"""The message of the guards."""

import re
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest
from book import PAGES, headings, page
from shared import ROOT

import optax_lossscale as ls
from optax_lossscale._diagnostics import stop_message

FORWARD, LAYER, DATA = "The forward pass", "The backward pass", "The batch or the"
TOO_HIGH, OLD_STATE = "The scale is too high", "The gradient function was built once"
OUTSIDE, RESULTS = "A wrapper outside", "If you use `check_updates=True`"
BATCHES, GROWS, FLOOR = "Some batches hold", "grows too soon", "at any scale from 1"
DERIVATIVE, EMPTY = "The derivative of `sqrt`", "A mean over nothing"
NAMES = [FORWARD, LAYER, DATA, TOO_HIGH, OLD_STATE, OUTSIDE, RESULTS, BATCHES, GROWS]
NAMES += [FLOOR, DERIVATIVE, EMPTY]


def message(state, **arguments):
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return str(error.value)


def causes(text):
    """The causes that a message names, in its order."""
    joined = " ".join(text.split("The last gradients:")[0].split())
    return sorted(filter(joined.count, NAMES), key=joined.index)


def test_the_message_says_what_happened_then_the_likeliest_causes_in_80_columns():
    state = ls.DynamicLossScale(init_scale=2.0**3).init()
    for flag in (False, True, False, False, False):
        state = ls.DynamicLossScale().update(state, flag)
    grads = [jnp.array([1.0, jnp.nan])] * 6
    report = ls.gradient_report(grads, loss_scale=state.loss_scale)
    text, _, shown = message(state, grads=grads).partition("\nThe last gradients:\n")
    assert shown == ls.format_report(report, limit=5)
    what, numbers, cause, *_ = lines = text.splitlines()
    assert what.startswith("The last 3 steps were all skipped, more than `max_cons")
    assert numbers == "Loss scale: 1. Skipped in all: 4."
    assert cause.startswith(f"1. {DATA}")
    assert all(len(line) <= 80 or line.startswith("   https:") for line in lines)
    assert len(set(re.findall("https:.*", text))) == 3


def test_every_cause_leads_to_a_page_and_heading_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    book = project["urls"]["Documentation"].removesuffix("index.md")
    texts = [x for x in vars(stop_message).values() if isinstance(x, str)]
    addresses = {*re.findall(r"https:\S+", "\n".join(texts))} - {book}
    assert len(addresses) > 10
    for address in addresses:
        file, _, heading = address.removeprefix(book).partition("#")
        assert heading in ["", *headings((PAGES / file).read_text())]


def test_the_page_has_the_sentences_so_that_a_search_for_them_leads_there():
    sentences = [*stop_message.WARNINGS.values(), DERIVATIVE, EMPTY, FLOOR]
    assert all(sentence in page("troubleshooting") for sentence in sentences)


FINITE, NAN, INF = ([jnp.ones(2), jnp.full(2, x)] for x in (1.0, jnp.nan, jnp.inf))


@pytest.mark.parametrize(
    ("scale", "grads", "value", "expected"),
    [
        (1.0, None, None, [DATA, FORWARD, FLOOR]),
        (2.0**9, None, None, [DATA, FORWARD, TOO_HIGH]),
        (1.0, NAN, None, [DATA, FORWARD, FLOOR]),
        # A loss that is not finite is a fault of the forward pass, a finite one is not.
        *((1.0, grads, jnp.nan, [DATA, FORWARD, EMPTY]) for grads in (None, NAN)),
        (1.0, None, 1.0, [FLOOR, LAYER, DERIVATIVE]),
        (1.0, INF, 1.0, [FLOOR, LAYER, DERIVATIVE]),
        (2.0**9, INF, None, [TOO_HIGH, LAYER, DERIVATIVE]),
        (1.0, NAN, 1.0, [DERIVATIVE, EMPTY, LAYER]),
        (2.0**9, NAN, 1.0, [TOO_HIGH, DERIVATIVE, EMPTY]),
        *((1.0, FINITE, value, [RESULTS, OUTSIDE, OLD_STATE]) for value in (None, 1.0)),
    ],
)
def test_the_causes_fit_the_scale_the_gradients_and_the_loss(
    scale, grads, value, expected
):
    counters = {"consecutive_skips": 200, "skipped_steps": 200}
    state = ls.DynamicLossScale().init()._replace(loss_scale=scale, **counters)
    assert causes(message(state, grads=grads, value=value)) == expected


def test_a_loss_that_is_a_sum_needs_a_scale_below_1_and_is_told_so():
    x, w = jnp.full((4096, 8), 40.0), jnp.ones(8)

    def loss_fn(w):
        return jnp.sum(x.astype(jnp.float16) @ w.astype(jnp.float16), dtype=jnp.float32)

    def train(**limits):
        tx = ls.with_loss_scaling(optax.sgd(0.0), ls.DynamicLossScale(**limits))

        def step(opt_state, _):
            loss, grads = ls.value_and_grad(loss_fn, opt_state)(w)
            return tx.update(grads, opt_state)[1], (loss, grads)

        opt_state, history = jax.lax.scan(step, tx.init(w), length=30)
        return opt_state, *jax.tree.map(lambda x: x[-1], history)

    opt_state, loss, grads = train()
    assert causes(message(opt_state, grads=grads, value=loss))[0] == FLOOR
    found = ls.get_loss_scale_state(train(min_scale=2.0**-20)[0])  # as it says
    assert found.consecutive_skips == 0 and found.loss_scale < 1
    suggested = ls.suggest_loss_scale(jax.grad(lambda w: jnp.sum(x @ w))(w))
    assert 2.0**-4 * found.loss_scale < suggested.loss_scale < found.loss_scale


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda x, labels: jnp.sqrt(jnp.sum(x**2)) * 0.0,
        lambda x, labels: jnp.where(x > 0, jnp.log(x), 0.0).sum(),
        lambda x, labels: jnp.where(
            labels.any(), jnp.sum(x * labels) / jnp.sum(labels), 0.0
        ),
    ],
    ids=["norm", "where", "labels"],
)
def test_nan_gradients_of_a_finite_loss_lead_to_the_derivative_and_the_mean(loss_fn):
    x, labels = jnp.zeros(3), jnp.zeros(3)
    loss, grads = jax.value_and_grad(loss_fn)(x, labels)
    assert jnp.isfinite(loss) and jnp.isnan(grads).all()
    state = ls.DynamicLossScale(init_scale=1.0).init()._replace(consecutive_skips=200)
    text = message(state, grads=grads, value=loss)
    assert causes(text)[:2] == [DERIVATIVE, EMPTY]


def test_a_share_of_skipped_steps_stops_too_and_names_the_batches():
    rule, errors = ls.DynamicLossScale(), []

    @jax.jit
    def epoch(state, flags):
        def step(state, flag):
            state = rule.update(state, flag)
            ls.check_loss_scale(state, on_error=errors.append, every=10)
            return state, None

        return jax.lax.scan(step, state, flags)[0]

    with pytest.warns(UserWarning, match="more than 5 % of the steps are skipped"):
        state = epoch(rule.init(), jnp.arange(200) % 2 == 0)
        jax.effects_barrier()
    # About every tenth of the hundred skipped steps, once the average is above 1/4.
    assert 5 <= len(errors) <= 20
    text = message(state)
    assert text.startswith("Of late, 44% of the steps were skipped.\n")
    assert causes(text) == causes(str(errors[-1])) == [BATCHES, FORWARD, GROWS]
    ls.check_loss_scale(epoch(state, jnp.ones(100, bool)))


def test_of_an_ensemble_the_message_names_one_member_and_its_numbers():
    rule, skips = ls.HeadroomLossScale(), jnp.array([[0, 4], [7, 1]])
    states = jax.tree.map(lambda x: jnp.full((2, 2), x), rule.init())
    states = states._replace(consecutive_skips=skips, skipped_steps=skips + 1)
    states = states._replace(loss_scale=jnp.array([[1.0, 2.0], [4.0, 8.0]]))
    text = message(states)
    assert text.startswith("The last 4 steps of member 0, 1 were all skipped, more")
    assert "\nLoss scale: 2. Skipped in all: 5.\n" in text
    rates = jnp.array([[0.0, 0.1], [0.3, 0.0]])
    text = message(states._replace(consecutive_skips=0 * skips, skip_rate=rates))
    assert text.startswith("Of late, 30% of the steps of member 1, 0 were skipped.")
