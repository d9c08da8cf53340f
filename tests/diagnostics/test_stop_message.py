"""The message of the guards."""

import jax
import jax.numpy as jnp
import optax
import pytest
from every_rule import RULES

import optax_lossscale as ls

MESSAGE = """\
The last 3 steps were all skipped, more than `max_consecutive_skips`=2, and 4 in \
total. The loss scale is 16.
Check the loss before it is scaled.
- If it is NaN or inf, the scale is not the problem. Check the data"""
NOT_THE_SCALE = "The scale has not fallen in these steps, so it is not the problem."


def message(state, **arguments):
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return str(error.value)


def test_the_message_after_overflows_says_how_many_and_what_to_do():
    rule = ls.DynamicLossScale(init_scale=2.0**8)
    state = rule.init()
    for flag in (False, True, False, False, False):
        state = rule.update(state, flag)
    assert message(state).startswith(MESSAGE)
    report = ls.gradient_report([jnp.array([1.0, jnp.nan])] * 6)
    table = ls.format_report(report, limit=5)
    shown = f"{message(state)}\nThe last gradients:\n{table}"
    assert message(state, report=report) == shown


def test_where_the_scale_is_not_the_cause_the_message_says_so():
    """A rule has counted finite steps that an overflow would have made it forget."""
    tx = ls.with_loss_scaling(optax.adam(0.1), check_updates=True)
    params = jnp.ones(2)
    _, state = tx.update(params, tx.init(params), params)
    for grads, value in ((1e30, 1.0), (jnp.nan, jnp.nan)):
        stopped = state
        for _ in range(3):
            _, stopped = tx.update(jnp.full(2, grads), stopped, params, value=value)
        assert NOT_THE_SCALE in message(stopped)
    fresh = ls.DynamicLossScale().init().record(False).record(False).record(False)
    for x in (1.0, jnp.nan, jnp.inf):
        report = ls.gradient_report([jnp.array([x])])
        assert (NOT_THE_SCALE in message(fresh, report=report)) == (x == 1.0)


SKIPPING = {name: rule for name, rule in RULES.items() if rule.skip_nonfinite}


@pytest.mark.parametrize("rule", SKIPPING.values(), ids=SKIPPING)
def test_after_overflows_under_any_rule_the_message_is_about_the_scale(rule):
    state = rule.init()
    args = (jnp.float32(1.0),) if rule.uses_max_magnitude else ()
    for flag in (True, True, True, False, False, False):
        state = rule.update(state, flag, *args)
    assert NOT_THE_SCALE not in message(state)


def test_of_an_ensemble_the_message_names_the_member_and_its_numbers():
    rule, skips = ls.HeadroomLossScale(), jnp.array([[0, 4], [7, 1]])
    states = jax.tree.map(lambda x: jnp.full((2, 2), x), rule.init())
    states = states._replace(consecutive_skips=skips, skipped_steps=skips + 1)
    states = states._replace(loss_scale=jnp.array([[1.0, 2.0], [4.0, 8.0]]))
    assert message(states).startswith(
        "The last 7 steps of member 1, 0 were all skipped, more than "
        "`max_consecutive_skips`=2, and 8 in total. The loss scale is 4.\n"
    )
