"""The message of the guards."""

import re
import tomllib

import jax
import jax.numpy as jnp
import pytest
from every_rule import RULES
from helpers import PAGES, ROOT, headings

import optax_lossscale as ls
from optax_lossscale._diagnostics import stop_message

FORWARD, LAYER, DATA = "The forward pass", "The backward pass", "The batch or the"
TOO_HIGH, OLD_STATE = "The scale is too high", "The gradient function was built once"
OUTSIDE, RESULTS = "A transformation outside", "If you use `check_updates=True`"
BATCHES, GROWS = "Some batches hold", "grows too soon"
NAMES = [FORWARD, LAYER, DATA, TOO_HIGH, OLD_STATE, OUTSIDE, RESULTS, BATCHES, GROWS]


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


FINITE, NAN = jnp.ones(2), jnp.full(2, jnp.nan)
SOME, ALL = [FINITE, NAN, FINITE], [NAN, NAN, NAN]
FINITE = [FINITE] * 3
FELL, COUNTED = {"loss_scale": 1.0}, {"growth_tracker": 7}
FALLING = {"loss_scale": 2.0**9, "consecutive_skips": 20}
KEPT = {"loss_scale": 2.0**9}
FIXED = {"hysteresis_tracker": -1, "loss_scale": 128.0}
FIXED_AT_1 = {"hysteresis_tracker": -1, "loss_scale": 1.0}


@pytest.mark.parametrize(
    ("fields", "grads", "expected"),
    [
        (FELL, ALL, [DATA, FORWARD, OLD_STATE]),
        (FELL, SOME, [DATA, LAYER, OLD_STATE]),
        (FELL, FINITE, [OLD_STATE, OUTSIDE, RESULTS]),
        (FALLING, None, [DATA, FORWARD, TOO_HIGH]),
        (FALLING, SOME, [DATA, LAYER, TOO_HIGH]),
        (KEPT, None, [DATA, FORWARD, RESULTS]),
        (KEPT, FINITE, [RESULTS, OLD_STATE, OUTSIDE]),
        (COUNTED, None, [DATA, FORWARD, RESULTS]),
        (COUNTED, FINITE, [RESULTS, OUTSIDE, DATA]),
        (FIXED, None, [DATA, FORWARD, TOO_HIGH]),
        (FIXED_AT_1, None, [DATA, FORWARD, RESULTS]),
    ],
)
def test_the_causes_fit_the_scale_and_the_gradients(fields, grads, expected):
    state = ls.DynamicLossScale().init()
    counters = {"consecutive_skips": 200, "skipped_steps": 200}
    state = state._replace(**counters | fields)
    assert causes(message(state, grads=grads)) == expected


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


SKIPPING = {name: rule for name, rule in RULES.items() if rule.skip_nonfinite}


@pytest.mark.parametrize("rule", SKIPPING.values(), ids=SKIPPING)
def test_after_overflows_under_any_rule_the_message_names_batch_and_forward_pass(rule):
    """And no rule is warned of before: warnings are errors."""
    state = rule.init()
    args = (jnp.float32(1e-9),) if rule.uses_max_magnitude else ()
    for flag in (True, False, False, False):
        ls.check_loss_scale(state)
        state = rule.update(state, flag, *args)
    assert causes(message(state))[:2] == [DATA, FORWARD]


def test_of_an_ensemble_the_message_names_the_member_and_its_numbers():
    rule, skips = ls.HeadroomLossScale(), jnp.array([[0, 4], [7, 1]])
    states = jax.tree.map(lambda x: jnp.full((2, 2), x), rule.init())
    states = states._replace(consecutive_skips=skips, skipped_steps=skips + 1)
    states = states._replace(loss_scale=jnp.array([[1.0, 2.0], [4.0, 8.0]]))
    text = message(states)
    assert text.startswith("The last 7 steps of member 1, 0 were all skipped, more")
    assert "\nLoss scale: 4. Skipped in all: 8.\n" in text
    rates = jnp.array([[0.0, 0.3], [0.1, 0.0]])
    text = message(states._replace(consecutive_skips=0 * skips, skip_rate=rates))
    assert text.startswith("Of late, 30% of the steps of member 0, 1 were skipped.")
