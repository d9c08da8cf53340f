"""What decides whether a step is applied, and what the scale learns of it."""

import functools

import jax
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits

import optax_lossscale as ls

PARAMS = {"w": np.ones(3, np.float32), "b": np.float32(1.0)}
RULE = ls.DynamicLossScale(growth_interval=3, hysteresis=2)
INF, NAN = np.inf, np.nan
YES, NO = np.bool_(True), np.bool_(False)
SCALE_STATES = {
    "applied": lambda state: RULE.update(state, True),
    "overflow": lambda state: RULE.update(state, False),
    # No scale cures a loss, or an optimizer, that is not finite: hysteresis stays.
    "skipped": lambda state: state.record(False),
}


def given(**extra_args):
    return jax.tree.map(
        lambda x: x if isinstance(x, np.bool_) else np.float32(x), extra_args
    )


# The factor of the gradients; 1e30 overflows in Adam's moments.
DECISIONS = [
    (1.0, given(), False, "applied"),
    (1.0, given(), True, "applied"),
    *((x, given(), y, "overflow") for x in (NAN, INF, -INF) for y in (False, True)),
    (1e30, given(), False, "applied"),
    (1e30, given(), True, "skipped"),
    (1.0, given(grads_finite=YES, value=3.0), True, "applied"),
    (1.0, given(grads_finite=None, value=None), False, "applied"),
    (1.0, given(grads_finite=NO), False, "overflow"),
    (NAN, given(grads_finite=YES), False, "overflow"),
    (1e30, given(grads_finite=NO), True, "overflow"),
    *((1.0, given(value=x), False, "skipped") for x in (NAN, INF, -INF)),
    (1.0, given(grads_finite=NO, value=NAN), False, "skipped"),
    *((INF, given(value=NAN), x, "skipped") for x in (False, True)),
    (1e30, given(value=NAN), True, "skipped"),
]


@functools.cache
def step_in(place, check_updates):
    axis_name = "i" if place == "beside a good member" else None
    options = {"axis_name": axis_name, "check_updates": check_updates}
    tx = ls.with_loss_scaling(optax.adam(0.1), RULE, **options)

    def step(factor, extra_args, state):
        grads = jax.tree.map(lambda p: factor * p, PARAMS)
        return tx.update(grads, state, PARAMS, **extra_args)

    members = jax.jit(jax.vmap(step, in_axes=(0, 0, None), axis_name="i"))
    return {"eager": step, "jit": jax.jit(step)}.get(place, members)


@pytest.mark.parametrize("place", ["eager", "jit", "beside a good member"])
@pytest.mark.parametrize(("factor", "extra_args", "check_updates", "what"), DECISIONS)
def test_step_is_applied_or_skipped(factor, extra_args, check_updates, what, place):
    """Along a named axis, one member decides for all."""
    arguments, before = (np.float32(factor), extra_args), RULE.update(RULE.init(), True)
    first = ls.with_loss_scaling(optax.adam(0.1)).init(PARAMS)
    first = first._replace(scale_state=before)
    is_member = place == "beside a good member"
    if is_member:
        good = np.float32(1.0), jax.tree.map(np.ones_like, extra_args)
        arguments = jax.tree.map(lambda *x: np.stack(x), arguments, good)
    updates, state = step_in(place, check_updates)(*arguments, first)
    if is_member:
        assert state.scale_state.applied.tolist() == [what == "applied"] * 2
        updates, state = jax.tree.map(lambda x: x[0], (updates, state))
    assert bool(ls.was_applied(state)) == (what == "applied")
    assert_same_bits(state.scale_state, SCALE_STATES[what](before))
    if what != "applied":
        assert_no_update(updates)
        assert_same_bits(state.inner_state, first.inner_state)
    elif factor == 1:
        expected = jax.jit(optax.adam(0.1).update)(PARAMS, first.inner_state, PARAMS)
        np.testing.assert_allclose(updates["w"], expected[0]["w"], rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grads_finite", [YES, NO])
def test_rule_that_never_skips_decides_nothing(grads_finite, compiled):
    """Neither by the gradients nor by the flag and the loss."""
    rule, inner = ls.FixedLossScale(8.0, skip_nonfinite=False), optax.adam(1.0)
    tx = ls.with_loss_scaling(inner, rule)
    bad = jax.tree.map(lambda p: p * np.float32(NAN), PARAMS)
    update = jax.jit(tx.update) if compiled else tx.update
    extra_args = given(grads_finite=grads_finite, value=NAN)
    updates, state = update(bad, tx.init(PARAMS), PARAMS, **extra_args)
    plain = jax.jit(inner.update) if compiled else inner.update
    expected = plain(bad, inner.init(PARAMS), PARAMS)
    assert_same_bits((updates, state.inner_state), expected)
    assert_same_bits(state.scale_state, rule.init())
