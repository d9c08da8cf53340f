"""The wrapper among Optax's other wrappers."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, page, table, without_keys
from optax import contrib

import optax_lossscale as ls

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(0.5)}
GOOD = {"w": jnp.array([3.0, -4.0, 0.0]), "b": jnp.array(0.0)}
BAD = {**GOOD, "b": jnp.array(jnp.nan)}
INF = {**GOOD, "b": jnp.array(jnp.inf)}
MASK = {"w": True, "b": False}


@functools.cache
def jitted_step(tx):
    @jax.jit
    def step(params, state, grads, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, sequence, params=PARAMS, **extra_args):
    state = tx.init(params)
    for grads in sequence:
        params, state = jitted_step(tx)(params, state, grads, **extra_args)
    return params, state


def skipped_steps(state):
    return int(ls.get_loss_scale_state(state).skipped_steps)


# What the guide says of wrappers around ours: how optax behaves, so not the default.
outside = pytest.mark.slow

ADAM = optax.adam(0.1)
CLIP = optax.clip_by_global_norm(1.0)
INSIDE = {
    "add_noise": optax.chain(optax.add_noise(0.1, 0.5, key=0), ADAM),
    "apply_if_finite": optax.apply_if_finite(ADAM, 1),
    "chain": optax.chain(CLIP, ADAM),
    "conditionally_transform": optax.conditionally_transform(
        ADAM, lambda step, **extra_args: step % 2 == 0
    ),
    "flatten": optax.flatten(ADAM),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0.0, 4)
    ),
    "lookahead": optax.lookahead(ADAM, 2, 0.5),
    "masked": optax.masked(ADAM, MASK),
    "mechanize": contrib.mechanize(ADAM),
    "MultiSteps": optax.MultiSteps(ADAM, 2),
    "named_chain": optax.named_chain(("clip", CLIP), ("adam", ADAM)),
    "partition": optax.partition(
        {"train": ADAM, "freeze": optax.set_to_zero()}, {"w": "train", "b": "freeze"}
    ),
    "reduce_on_plateau": optax.chain(ADAM, contrib.reduce_on_plateau(patience=1)),
    "sam": contrib.sam(ADAM, optax.sgd(0.1)),
    "schedule_free": contrib.schedule_free(ADAM, 0.1),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(ADAM),
    "trace": optax.trace(0.9),
}
if hasattr(optax, "freeze"):  # from optax 0.2.6
    INSIDE["freeze"] = optax.chain(ADAM, optax.freeze({"w": False, "b": True}))
    INSIDE["selective_transform"] = optax.selective_transform(
        ADAM, freeze_mask={"w": False, "b": True}
    )
if hasattr(optax, "snapshot"):  # from optax 0.2.6
    INSIDE["snapshot"] = optax.chain(optax.snapshot("norm", optax.tree.norm), ADAM)


# The others are slow.
USUAL = ("chain", "masked", "MultiSteps")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in USUAL else pytest.mark.slow) for n in INSIDE],
)
def test_inside_a_bad_step_is_as_if_it_had_not_been(name):
    inner, start = INSIDE[name], PARAMS
    if name == "lookahead":
        start = optax.LookaheadParams.init_synced(PARAMS)
    value = {"value": 1.0} if name == "reduce_on_plateau" else {}
    tx = ls.with_loss_scaling(inner)
    before, after, further = (
        run(tx, sequence, start, **value)
        for sequence in ([GOOD] * 3, [GOOD] * 3 + [BAD, INF], [GOOD, BAD, GOOD, INF])
    )
    assert_same_bits(after[0], before[0])
    assert_same_bits(after[1].inner_state, before[1].inner_state)
    plain_params, plain_state = run(inner, [GOOD, GOOD], start, **value)
    chex.assert_trees_all_close(further[0], plain_params, rtol=1e-6)
    chex.assert_trees_all_close(
        *map(without_keys, (further[1].inner_state, plain_state)), rtol=1e-6
    )


def test_the_guide_names_nothing_that_is_not_tested_here():
    rows = table(page("guides/wrappers"), "wrapper")
    named = set(re.findall(r"`optax\.(?:contrib\.)?(\w+)`", str(rows)))
    tested_below = {"clip", "clip_by_global_norm", "monitor", "zero_nans"}
    tested_below |= LETTING_PAST.keys()
    assert named <= INSIDE.keys() | tested_below | {"freeze", "snapshot"}
    assert len(named) > 15


def test_clipping_sees_true_gradients_on_either_side():
    inside = ls.with_loss_scaling(optax.chain(CLIP, optax.sgd(1.0)))
    outside = optax.chain(CLIP, ls.with_loss_scaling(optax.sgd(1.0)))
    for tx in (inside, outside):
        params, _ = run(tx, [GOOD])
        np.testing.assert_allclose(params["w"], [0.4, -1.2, 3.0], rtol=1e-6)


def test_multi_steps_inside_passes_extra_arguments_on():
    seen = []

    def update(updates, state, params=None, *, value=None, **extra_args):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    steps = optax.MultiSteps(inner, 1)
    for given in (steps, steps.gradient_transformation()):
        tx = ls.with_loss_scaling(given)
        state = tx.init(PARAMS)
        seen.clear()
        tx.update(GOOD, state, PARAMS, value=jnp.float32(7.0))
        assert seen and all(value is not None for value in seen)


@outside
@pytest.mark.parametrize("bad", [BAD, INF])
@pytest.mark.parametrize(
    "before, lets_through",
    [
        (CLIP, True),
        (optax.clip_by_block_rms(1.0), True),
        (optax.adaptive_grad_clip(0.1), True),
        (optax.clip(1.0), False),
        (optax.zero_nans(), False),
    ],
)
def test_what_stands_before_it_must_let_non_finite_gradients_through(
    before, lets_through, bad
):
    tx = optax.chain(before, ls.with_loss_scaling(optax.sgd(1.0)))
    params, state = run(tx, [bad])
    hidden = not lets_through and (bad is INF) == (before.init(PARAMS) == ())
    assert skipped_steps(state) == (not hidden)
    assert bool(jnp.all(params["w"] == PARAMS["w"])) == (not hidden)


@outside
def test_momentum_before_it_keeps_a_nan_and_after_it_moves_a_skipped_step():
    scaled = ls.with_loss_scaling(optax.sgd(1.0))
    _, state = run(optax.chain(optax.trace(0.9), scaled), [BAD, GOOD, GOOD])
    assert skipped_steps(state) == 3
    params, state = run(optax.chain(scaled, optax.trace(0.9)), [GOOD, BAD])
    assert skipped_steps(state) == 1
    assert not np.array_equal(params["w"], run(scaled, [GOOD])[0]["w"])


@outside
def test_noise_after_it_moves_a_skipped_step():
    noise = optax.add_noise(0.1, 0.5, key=0)
    params, _ = run(optax.chain(ls.with_loss_scaling(ADAM), noise), [BAD])
    assert not np.array_equal(params["w"], PARAMS["w"])


@outside
def test_lookahead_outside_may_synchronize_in_a_skipped_step():
    tx = optax.lookahead(ls.with_loss_scaling(optax.sgd(0.1)), 2, 0.5)
    start = optax.LookaheadParams.init_synced(PARAMS)
    params, state = run(tx, [GOOD, BAD], start)
    assert skipped_steps(state) == 1
    assert not np.array_equal(params.slow["w"], run(tx, [GOOD], start)[0].slow["w"])


@outside
def test_schedule_free_outside_moves_a_skipped_step():
    tx = contrib.schedule_free(ls.with_loss_scaling(optax.sgd(0.1)), 0.1, b1=0.9)
    params, state = run(tx, [GOOD, GOOD, BAD])
    assert skipped_steps(state) == 1
    assert not np.array_equal(params["w"], run(tx, [GOOD, GOOD])[0]["w"])


@outside
def test_mechanize_outside_takes_the_nan():
    tx = contrib.mechanize(ls.with_loss_scaling(optax.sgd(0.1)))
    assert np.isnan(run(tx, [GOOD, BAD])[0]["w"]).all()


@outside
def test_reduce_on_plateau_outside_counts_a_loss_that_is_not_finite_as_no_progress():
    def scale(tx):
        params, state = PARAMS, tx.init(PARAMS)
        for grads, value in ((GOOD, 1.0), (BAD, jnp.nan), (GOOD, 0.5)):
            updates, state = tx.update(grads, state, params, value=value)
        return float(optax.tree.get(state, "scale"))

    plateau = contrib.reduce_on_plateau(factor=0.5, patience=1)
    sgd = optax.sgd(0.1)
    assert scale(optax.chain(ls.with_loss_scaling(sgd), plateau)) == 0.5
    assert scale(ls.with_loss_scaling(optax.chain(sgd, plateau))) == 1.0


def test_flatten_outside_is_as_good():
    tx = optax.flatten(ls.with_loss_scaling(ADAM))
    params, state = run(tx, [GOOD, BAD, GOOD])
    assert skipped_steps(state) == 1
    assert_same_bits(params, run(tx, [GOOD, GOOD])[0])


HIDING = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 10),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}
LETTING_PAST = {
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition(
        {"scaled": tx, "not": optax.sgd(0.1)}, {"w": "scaled", "b": "not"}
    ),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step, **extra_args: step > 0
    ),
    "conditionally_mask": lambda tx: optax.conditionally_mask(
        tx, lambda step, **extra_args: step > 0
    ),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "contrib.schedule_free": lambda tx: contrib.schedule_free(tx, 0.1),
    "contrib.mechanize": lambda tx: contrib.mechanize(tx),
    "contrib.sam": lambda tx: contrib.sam(tx, optax.sgd(0.1)),
}


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("name", HIDING | LETTING_PAST)
def test_a_scale_whose_rule_does_not_see_overflows_is_refused(name, chained):
    tx = (HIDING | LETTING_PAST)[name](ls.with_loss_scaling(ADAM))
    params = PARAMS
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(PARAMS)
    state = optax.chain(CLIP, tx).init(params) if chained else tx.init(params)
    for use in (
        lambda: ls.value_and_grad(lambda p: p["b"], state),
        lambda: ls.grad(lambda p: p["b"], state),
        lambda: ls.scale_loss(1.0, state),
        lambda: ls.unscale_grads(GOOD, state),
    ):
        with pytest.raises(ValueError, match=f"`state` must have .*optax.{name}`"):
            use()
    assert float(ls.get_loss_scale(state)) == 2.0**15


def test_what_is_frozen_beside_it_may_stand_outside():
    """A NaN there becomes zero."""
    scaled, others = ls.with_loss_scaling(ADAM), {"w": False, "b": True}
    frozen = optax.partition(
        {"train": scaled, "freeze": optax.set_to_zero()}, {"w": "train", "b": "freeze"}
    )
    beside = optax.chain(
        optax.masked(scaled, MASK), optax.masked(optax.set_to_zero(), others)
    )
    everything = optax.chain(CLIP, optax.masked(scaled, {"w": True, "b": True}))
    for tx in (frozen, beside, everything):
        state = tx.init(PARAMS)
        ls.value_and_grad(lambda p: p["b"], state)
    params, _ = run(frozen, [BAD])
    assert ls.all_finite(params)
    part = optax.partition({"a": scaled, "b": scaled}, {"w": "a", "b": "b"}).init(
        PARAMS
    )
    ls.value_and_grad(lambda p: p["b"], part.inner_states["a"].inner_state)


@pytest.mark.parametrize("name", LETTING_PAST)
def test_the_other_way_round_is_not_refused(name):
    start = PARAMS
    if name == "lookahead":
        start = optax.LookaheadParams.init_synced(PARAMS)
    state = ls.with_loss_scaling(LETTING_PAST[name](ADAM)).init(start)
    ls.value_and_grad(lambda p: p["b"], state)


@outside
@pytest.mark.parametrize("name", HIDING)
def test_why_it_is_refused(name):
    tx = HIDING[name](ls.with_loss_scaling(optax.sgd(1.0)))
    params, state = run(tx, [BAD] * 2 + [GOOD] * 6)
    if name == "apply_if_finite":
        assert float(ls.get_loss_scale(state)) == 2.0**15
    else:
        assert_same_bits(params, PARAMS)
        assert skipped_steps(state) == 4


def test_apply_if_finite_inside_is_redundant():
    tx = ls.with_loss_scaling(optax.apply_if_finite(optax.sgd(1.0), 1))
    params, state = run(tx, [BAD] * 5 + [GOOD])
    assert int(state.inner_state.total_notfinite) == 0
    assert_same_bits(params, run(optax.sgd(1.0), [GOOD])[0])


@outside
@pytest.mark.parametrize(
    "name", ["masked", "partition", "freeze", "conditionally_transform"]
)
def test_outside_some_gradients_are_not_checked(name):
    scaled = ls.with_loss_scaling(ADAM)
    if name == "freeze":
        if not hasattr(optax, name):
            pytest.skip("needs a newer optax")
        tx = optax.chain(optax.freeze({"w": False, "b": True}), scaled)
    else:
        tx = LETTING_PAST[name](scaled)
    _, state = run(tx, [BAD])
    assert skipped_steps(state) == 0
    assert bool(ls.was_applied(state))


@outside
@pytest.mark.skipif(not hasattr(optax, "snapshot"), reason="needs a newer optax")
def test_snapshot_before_it_measures_skipped_steps_too():
    snapshot = optax.snapshot("size", optax.tree.norm)
    _, state = run(optax.chain(snapshot, ls.with_loss_scaling(ADAM)), [GOOD, BAD])
    assert np.isnan(optax.tree.get(state, "size"))
    _, state = run(ls.with_loss_scaling(optax.chain(snapshot, ADAM)), [GOOD, BAD])
    assert float(optax.tree.get(state, "size")) == 5.0


@outside
@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="needs a newer optax")
def test_monitor_before_it_works():
    monitor = optax.monitor({"size": optax.tree.norm})
    params, state = run(
        optax.chain(monitor, ls.with_loss_scaling(ADAM)), [GOOD, BAD, GOOD]
    )
    assert float(optax.tree.get(state, "size")) == 5.0
    assert_same_bits(params, run(ls.with_loss_scaling(ADAM), [GOOD, GOOD])[0])


@outside
def test_sam_outside_takes_the_nan():
    tx = contrib.sam(ls.with_loss_scaling(ADAM), optax.sgd(0.1))
    assert np.isnan(run(tx, [BAD])[0]["b"])


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


def test_accessors_take_the_inner_state():
    plain = optax.contrib.schedule_free_sgd(0.1)
    tx = ls.with_loss_scaling(plain)
    params, state = run(tx, [GOOD, BAD, GOOD])
    expected_params, expected_state = run(plain, [GOOD, GOOD])
    accessor = optax.contrib.schedule_free_eval_params
    assert_same_bits(
        accessor(state.inner_state, params), accessor(expected_state, expected_params)
    )


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
