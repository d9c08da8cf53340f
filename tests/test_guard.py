"""check_loss_scale."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ls


def after(skips, rule=ls.DynamicLossScale(init_scale=2.0**8)):  # noqa: B008
    tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
    params = jnp.ones(2)
    opt_state = tx.init(params)
    for _ in range(skips):
        _, opt_state = jax.jit(tx.update)(jnp.nan * params, opt_state, params)
    return opt_state


def test_it_raises_at_one_step_more_than_allowed():
    opt_state = after(3)
    ls.check_loss_scale(opt_state, max_consecutive_skips=3)
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(opt_state, max_consecutive_skips=2)
    message = str(error.value)
    assert message.startswith("The last 3 steps were all skipped, more than ")
    assert "`max_consecutive_skips`=2, and 3 in all; the loss scale is 32." in message
    assert "lower the learning rate" in message


def test_the_default_lets_the_scale_come_down_from_anywhere():
    ls.check_loss_scale(after(100))
    with pytest.raises(ls.LossScaleError, match="The last 101 steps"):
        ls.check_loss_scale(after(101))


def test_steps_that_were_skipped_apart_do_not_add_up():
    rule = ls.FixedLossScale()
    state = rule.init()
    for flag in (False, False, True, False, False):
        state = rule.update(state, flag)
        ls.check_loss_scale(state, max_consecutive_skips=2)


def test_a_rule_that_never_skips_never_raises():
    ls.check_loss_scale(after(3, ls.FixedLossScale(skip_nonfinite=False)))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
def test_a_limit_that_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match="`max_consecutive_skips` must be a whole"):
        ls.check_loss_scale(after(0), max_consecutive_skips=value)


def test_a_state_without_a_scale_is_refused():
    with pytest.raises(ValueError, match="`state` must contain a LossScaleState"):
        ls.check_loss_scale(optax.adam(1e-3).init(jnp.ones(2)))
