"""The message of the guards."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from every_rule import PRESETS, VARIANTS
from helpers import ROOT

import optax_lossscale as ls

MESSAGE = """\
The last 3 steps were all skipped, more than `max_consecutive_skips`=2.
Loss scale: 1. Skipped in all: 4.
1. The forward pass overflows: an activation is above 65504, the largest
   float16, so the loss and nearly all gradients are NaN or inf. No loss scale
   helps. Find the block, and compute it in float32. See
   notebooks/troubleshooting.md.
2. """
FORWARD, LAYER, DATA = "The forward pass", "The backward pass", "The batch or the"
TOO_HIGH, OLD_STATE = "The scale is too high", "The gradient function was built once"
OUTSIDE, RESULTS = "A transformation outside", "With `check_updates=True`"
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


def test_the_message_says_what_happened_then_the_likeliest_cause_in_80_columns():
    rule = ls.DynamicLossScale(init_scale=2.0**3)
    state = rule.init()
    for flag in (False, True, False, False, False):
        state = rule.update(state, flag)
    text = message(state)
    assert text.startswith(MESSAGE)
    assert max(map(len, text.splitlines())) <= 80
    for page in re.findall(r"notebooks/\S+\.md", text):
        assert (ROOT / page).is_file()
    grads = [jnp.array([1.0, jnp.nan])] * 6
    report = ls.gradient_report(grads, loss_scale=state.loss_scale)
    table = ls.format_report(report, limit=5)
    assert message(state, grads=grads) == f"{text}\nThe last gradients:\n{table}"


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
        (FELL, None, [FORWARD, DATA, OLD_STATE]),
        (FELL, ALL, [FORWARD, DATA, OLD_STATE]),
        (FELL, SOME, [LAYER, DATA, OLD_STATE]),
        (FELL, FINITE, [OLD_STATE, OUTSIDE, RESULTS]),
        (FALLING, None, [FORWARD, TOO_HIGH, DATA]),
        (FALLING, SOME, [LAYER, TOO_HIGH, DATA]),
        (KEPT, None, [FORWARD, RESULTS, DATA]),
        (KEPT, FINITE, [RESULTS, OLD_STATE, OUTSIDE]),
        (COUNTED, None, [FORWARD, DATA, RESULTS]),
        (COUNTED, ALL, [FORWARD, DATA, RESULTS]),
        (COUNTED, FINITE, [RESULTS, OUTSIDE, DATA]),
        (FIXED, None, [FORWARD, TOO_HIGH, DATA]),
        (FIXED, SOME, [LAYER, TOO_HIGH, DATA]),
        (FIXED_AT_1, None, [FORWARD, DATA, RESULTS]),
        (FIXED_AT_1, FINITE, [RESULTS, OUTSIDE, DATA]),
    ],
)
def test_the_causes_fit_the_scale_and_the_gradients(fields, grads, expected):
    state = ls.DynamicLossScale().init()
    counters = {"consecutive_skips": 200, "skipped_steps": 200}
    state = state._replace(**counters | fields)
    assert causes(message(state, grads=grads)) == expected


def test_a_gradient_function_built_from_an_old_state_is_the_first_cause():
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    params = {"w": jnp.full(2, 60.0)}
    state = tx.init(params)

    def loss(params):
        return jnp.sum(params["w"].astype(jnp.float16) ** 2).astype(jnp.float32)

    from_the_first_state = ls.grad(loss, state)
    for _ in range(20):
        _, state = tx.update(from_the_first_state(params), state, params)
    assert ls.get_loss_scale(state) == 1.0
    grads = ls.grad(loss, state)(params)
    assert causes(message(state, grads=grads))[0] == OLD_STATE


def test_a_share_of_skipped_steps_stops_too_and_names_the_batches():
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    params = jnp.ones(2)
    state = tx.init(params)

    @functools.partial(jax.jit, static_argnames="guarded")
    def epoch(state, batches, guarded=False):
        def step(state, x):
            _, state = tx.update(x * params, state, params)
            if guarded:
                ls.check_loss_scale(state, on_error=errors.append, every=10)
            return state, None

        return jax.lax.scan(step, state, batches)[0]

    errors = []
    state = epoch(state, jnp.resize(jnp.array([1.0, jnp.nan]), 200), guarded=True)
    jax.effects_barrier()
    # About every tenth of the hundred skipped steps, once the average is above 1/4.
    assert 5 <= len(errors) <= 20
    text = message(state)
    assert text.startswith("Of late, 44% of the steps were skipped.\n")
    assert causes(text) == [BATCHES, FORWARD, GROWS]
    assert causes(str(errors[-1])) == causes(text)
    ls.check_loss_scale(epoch(state, jnp.ones(100)))


def test_no_preset_is_warned_of_before_the_first_step():
    for rule in PRESETS.values():
        ls.check_loss_scale(rule.init())  # warnings are errors


SKIPPING = {name: rule for name, rule in VARIANTS.items() if rule.skip_nonfinite}


@pytest.mark.parametrize("rule", SKIPPING.values(), ids=SKIPPING)
def test_after_overflows_under_any_rule_the_message_names_the_forward_pass(rule):
    """And no rule is warned of before: a scale may follow the gradients."""
    state = rule.init()
    args = (jnp.float32(1e-9),) if rule.uses_max_magnitude else ()
    for flag in (True, False, False, False):
        ls.check_loss_scale(state)
        state = rule.update(state, flag, *args)
    assert causes(message(state))[0] == FORWARD


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
