"""The message of the guard."""

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
- If it is NaN or inf, the scale is not the problem. Check the data and the \
parameters, or lower the learning rate.
- If it is finite and the scale is at its minimum, do the same.
- If it is finite and the scale is still falling, start from a lower scale.
- If it is finite and the scale is fixed, lower the scale. If it is 1 and blocks are \
wrapped with `scale_backward`, raise their `headroom`.
- If it is finite and the scale is above its minimum and has not fallen, the \
optimizer turns finite gradients into NaN or inf, and `check_updates=True` skips these \
steps. The scale is not the problem. Clip the gradients, raise `eps`, keep the moments \
in float32, or wrap the optimizer of float16 parameters with `with_master_weights`.
- If it is finite but multiplied by an earlier scale, the gradient function was built \
from an earlier state, and the compiled program holds that scale as a constant. Build \
it inside the step, from the state that is passed to the step."""


def message(state, **arguments):
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(state, max_consecutive_skips=2, **arguments)
    return str(error.value)


def test_the_whole_message():
    rule = ls.DynamicLossScale(init_scale=2.0**8)
    state = rule.init()
    for flag in (False, True, False, False, False):
        state = rule.update(state, flag)
    assert message(state) == MESSAGE
    report = ls.gradient_report([jnp.array([1.0, jnp.nan])])
    table = ls.format_report(report)
    assert message(state, report=report) == f"{MESSAGE}\nThe last gradients:\n{table}"


def test_it_does_not_say_that_the_scale_has_moved():
    """A loss that is NaN leaves it where it was."""
    state = ls.DynamicLossScale().init().record(False).record(False).record(False)
    assert "The loss scale is 32768.\n" in message(state)


OPTIMIZER_MAKES_NAN = """\
The scale has not fallen in these steps, so it is not the problem. Check the loss.
- If it is NaN or inf, the scale is not the problem. Check the data and the \
parameters, or lower the learning rate.
- If it is finite, the optimizer turns finite gradients into NaN or inf, and \
`check_updates=True` skips these steps. The scale is not the problem. Clip the \
gradients, raise `eps`, keep the moments in float32, or wrap the optimizer of float16 \
parameters with `with_master_weights`."""


def test_where_the_scale_is_not_the_cause_it_says_so():
    """A rule has counted finite steps that an overflow would have made it forget."""
    tx = ls.with_loss_scaling(optax.adam(0.1), check_updates=True)
    params = jnp.ones(2)
    _, state = tx.update(params, tx.init(params), params)
    for grads, value in ((1e30, 1.0), (jnp.nan, jnp.nan)):
        stopped = state
        for _ in range(3):
            _, stopped = tx.update(jnp.full(2, grads), stopped, params, value=value)
        assert OPTIMIZER_MAKES_NAN in message(stopped)
    fresh = ls.DynamicLossScale().init().record(False).record(False).record(False)
    finite, nan = (ls.gradient_report([jnp.array([x])]) for x in (1.0, jnp.nan))
    assert OPTIMIZER_MAKES_NAN in message(fresh, report=finite)
    assert OPTIMIZER_MAKES_NAN not in message(fresh, report=nan)


SKIPPING = {name: rule for name, rule in RULES.items() if rule.skip_nonfinite}


@pytest.mark.parametrize("rule", SKIPPING.values(), ids=SKIPPING)
def test_where_gradients_overflowed_it_does_not(rule):
    state = rule.init()
    args = (jnp.float32(1.0),) if rule.uses_max_magnitude else ()
    for flag in (True, True, True, False, False, False):
        state = rule.update(state, flag, *args)
    assert OPTIMIZER_MAKES_NAN not in message(state)


def test_of_an_ensemble_it_names_the_member_and_its_numbers():
    rule = ls.DynamicLossScale()
    states = jax.tree.map(lambda x: jnp.stack([x] * 4).reshape(2, 2), rule.init())
    skips = jnp.array([[0, 4], [7, 1]])
    states = states._replace(
        loss_scale=jnp.array([[1.0, 2.0], [4.0, 8.0]]),
        consecutive_skips=skips,
        skipped_steps=skips + 1,
    )
    assert message(states).startswith(
        "The last 7 steps of member 1, 0 were all skipped, more than "
        "`max_consecutive_skips`=2, and 8 in total. The loss scale is 4.\n"
    )
