"""The wrapper among Optax's other wrappers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

import optax_lossscale as ls

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(0.5)}
GOOD = {"w": jnp.array([3.0, -4.0, 0.0]), "b": jnp.array(0.0)}
BAD = {**GOOD, "b": jnp.array(jnp.nan)}


def run(tx, sequence, params=PARAMS):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grads in sequence:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_clipping_sees_true_gradients_on_either_side():
    clip = optax.clip_by_global_norm(1.0)
    inside = ls.with_loss_scaling(optax.chain(clip, optax.sgd(1.0)))
    outside = optax.chain(clip, ls.with_loss_scaling(optax.sgd(1.0)))
    for tx in (inside, outside):
        params, _ = run(tx, [GOOD])
        np.testing.assert_allclose(params["w"], [0.4, -1.2, 3.0], rtol=1e-6)


def test_multi_steps_inside_drops_the_bad_micro_batch_alone():
    inner = optax.MultiSteps(optax.sgd(1.0), 2)
    params, state = run(ls.with_loss_scaling(inner), [GOOD, BAD, GOOD])
    expected, _ = run(optax.MultiSteps(optax.sgd(1.0), 2), [GOOD, GOOD])
    assert_same_bits(params, expected)
    assert int(ls.get_loss_scale_state(state).skipped_steps) == 1


def test_multi_steps_inside_passes_extra_arguments_on():
    seen = []

    def update(updates, state, params=None, *, value=None, **extra_args):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    steps = optax.MultiSteps(inner, 1)
    for given in (steps, steps.gradient_transformation()):
        seen.clear()
        tx = ls.with_loss_scaling(given)
        tx.update(GOOD, tx.init(PARAMS), PARAMS, value=jnp.float32(7.0))
        assert seen and all(value is not None for value in seen)


def test_multi_steps_outside_keeps_a_nan_for_ever():
    """Why the documentation says to put it inside."""
    tx = optax.MultiSteps(ls.with_loss_scaling(optax.sgd(1.0)), 2)
    params, state = run(tx, [BAD] + [GOOD] * 7)
    assert_same_bits(params, PARAMS)
    assert int(ls.get_loss_scale_state(state).skipped_steps) > 0


def test_apply_if_finite_outside_hides_the_overflow_from_the_rule():
    """Why the documentation says never to do it."""
    tx = optax.apply_if_finite(ls.with_loss_scaling(optax.sgd(1.0)), 10)
    _, state = run(tx, [BAD] * 5)
    assert float(ls.get_loss_scale(state)) == 2.0**15


def test_apply_if_finite_inside_is_redundant():
    tx = ls.with_loss_scaling(optax.apply_if_finite(optax.sgd(1.0), 1))
    params, state = run(tx, [BAD] * 5 + [GOOD])
    assert int(state.inner_state.total_notfinite) == 0
    assert_same_bits(params, run(optax.sgd(1.0), [GOOD])[0])


def test_masked_outside_leaves_the_other_leaves_unchecked():
    tx = optax.masked(ls.with_loss_scaling(optax.sgd(1.0)), {"w": True, "b": False})
    _, state = run(tx, [BAD])
    assert bool(ls.get_loss_scale_state(state).grads_finite)


def test_masked_and_partition_inside():
    frozen = optax.partition(
        {"train": optax.adam(0.1), "freeze": optax.set_to_zero()},
        {"w": "train", "b": "freeze"},
    )
    masked = optax.masked(optax.trace(0.9), {"w": True, "b": False})
    for inner in (frozen, masked):
        tx = ls.with_loss_scaling(inner)
        params, state = run(tx, [BAD, BAD])
        assert_same_bits(params, PARAMS)
        assert_same_bits(state.inner_state, inner.init(PARAMS))
        assert_same_bits(run(tx, [GOOD])[0], run(inner, [GOOD])[0])


def test_schedules_do_not_advance_on_a_skipped_step():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    tx = ls.with_loss_scaling(optax.sgd(schedule))
    assert_same_bits(run(tx, [GOOD, BAD, GOOD])[0], run(tx, [GOOD, GOOD])[0])


@pytest.mark.parametrize("side", ["inside", "outside"])
def test_inject_hyperparams_on_either_side(side):
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    if side == "inside":
        tx = ls.with_loss_scaling(optax.inject_hyperparams(optax.sgd)(schedule))
    else:
        tx = optax.inject_hyperparams(
            lambda learning_rate: ls.with_loss_scaling(optax.sgd(learning_rate))
        )(learning_rate=schedule)
    params, state = run(tx, [GOOD, BAD])
    np.testing.assert_allclose(params["w"], [-2.0, 2.0, 3.0])
    assert float(ls.get_loss_scale(state)) == 2.0**14


def test_inject_hyperparams_may_trace_the_rules_numbers():
    def make(init_scale, growth_interval):
        rule = ls.DynamicLossScale(
            init_scale=init_scale, growth_interval=growth_interval
        )
        return ls.with_loss_scaling(optax.sgd(1.0), rule)

    tx = optax.inject_hyperparams(make)(init_scale=64.0, growth_interval=2)
    _, state = run(tx, [GOOD])
    assert float(ls.get_loss_scale(state)) == 64.0
    state.hyperparams["growth_interval"] = jnp.asarray(1)
    _, state = jax.jit(tx.update)(GOOD, state, PARAMS)
    assert float(ls.get_loss_scale(state)) == 128.0


def test_inject_hyperparams_takes_a_rule_for_a_value():
    """A rule that could be called would be taken for a schedule."""
    tx = optax.inject_hyperparams(
        lambda learning_rate, rule: ls.with_loss_scaling(optax.sgd(learning_rate), rule)
    )(learning_rate=1.0, rule=ls.FixedLossScale(64.0))
    _, state = run(tx, [GOOD])
    assert float(ls.get_loss_scale(state)) == 64.0


def test_tree_set_and_map_params_see_through_the_wrapper():
    tx = optax.chain(optax.clip(1.0), ls.with_loss_scaling(optax.adam(1e-3)))
    state = tx.init(PARAMS)
    state = optax.tree.set(state, loss_scale=jnp.float32(8.0))
    assert float(ls.get_loss_scale(state)) == 8.0
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert_same_bits(ls.get_loss_scale_state(doubled), ls.get_loss_scale_state(state))
    assert float(doubled[1].inner_state[0].mu["b"]) == 1.0


def test_a_chain_of_several_transformations_under_one_scale():
    decay = ("decay", optax.add_decayed_weights(0.1))
    tx = ls.with_loss_scaling(optax.named_chain(decay, ("sgd", optax.sgd(1.0))))
    assert_same_bits(run(tx, [BAD])[0], PARAMS)


def test_accessors_take_the_inner_state():
    plain = optax.contrib.schedule_free_sgd(0.1)
    tx = ls.with_loss_scaling(plain)
    params, state = run(tx, [GOOD, BAD, GOOD])
    expected_params, expected_state = run(plain, [GOOD, GOOD])
    accessor = optax.contrib.schedule_free_eval_params
    assert_same_bits(
        accessor(state.inner_state, params), accessor(expected_state, expected_params)
    )


def test_wrapping_the_optimizer_of_a_running_job_keeps_its_state():
    params, old_state = run(optax.adam(0.1), [GOOD, GOOD])
    tx = ls.with_loss_scaling(optax.adam(0.1))
    state = tx.init(params)._replace(inner_state=old_state)
    updates, _ = jax.jit(tx.update)(GOOD, state, params)
    expected, _ = jax.jit(optax.adam(0.1).update)(GOOD, old_state, params)
    assert_same_bits(updates, expected)


def test_select_protects_what_the_optimizer_does_not_see():
    """As BatchNorm statistics after an overflow in the forward pass."""
    tx = ls.with_loss_scaling(optax.sgd(0.1))

    @jax.jit
    def step(params, state, mean, x):
        def loss_fn(params):
            y = params["w"] * x
            return jnp.mean(y**2), 0.9 * mean + 0.1 * y.mean()

        fun = ls.value_and_grad(loss_fn, state, has_aux=True)
        (_, new_mean), grads = fun(params)
        updates, state = tx.update(grads, state, params)
        finite = ls.get_loss_scale_state(state).grads_finite
        mean = ls.select(finite, new_mean, mean)
        return optax.apply_updates(params, updates), state, mean

    params, state, mean = {"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}), jnp.zeros(())
    params, state, mean = step(params, state, mean, jnp.ones(3))
    before = mean
    params, state, mean = step(params, state, mean, jnp.array([1.0, jnp.inf, 1.0]))
    assert_same_bits(mean, before)
    assert float(mean) != 0.0
