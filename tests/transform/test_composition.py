"""The wrapper among Optax's other wrappers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import FACTORIES
from helpers import assert_same_bits, page, table
from optax import contrib

import optax_lossscale as ls

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(0.5)}
GOOD = {"w": jnp.array([3.0, -4.0, 0.0]), "b": jnp.array(0.0)}
BAD = {**GOOD, "b": jnp.array(jnp.nan)}
INF = {**GOOD, "b": jnp.array(jnp.inf)}
MASK, REST = {"w": True, "b": False}, {"w": False, "b": True}
SGD, ADAM, CLIP = optax.sgd(0.1), optax.adam(0.1), optax.clip_by_global_norm(1.0)
SCALED = ls.with_loss_scaling(SGD)
# What the guide says of wrappers around ours: how optax behaves, so not the default.
slow = pytest.mark.slow


@functools.cache
def jitted_step(tx):
    @jax.jit
    def step(params, state, grads, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def start_for(name):
    return optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS


def run(tx, sequence, params=PARAMS, **extra_args):
    state = tx.init(params)
    for grads in sequence:
        params, state = jitted_step(tx)(params, state, grads, **extra_args)
    return params, state


def skipped_steps(state):
    return int(ls.get_loss_scale_state(state).skipped_steps)


def later_steps(step, **extra_args):
    return step > 0


HIDING = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 10),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "MultiSteps that skips": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}
LETTING_PAST = {
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition(
        {"scaled": tx, "not": SGD}, {"w": "scaled", "b": "not"}
    ),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, later_steps
    ),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, later_steps),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "contrib.schedule_free": lambda tx: contrib.schedule_free(tx, 0.1),
    "contrib.mechanize": contrib.mechanize,
    "contrib.sam": lambda tx: contrib.sam(tx, SGD),
}


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("name", HIDING | LETTING_PAST)
def test_a_scale_whose_rule_does_not_see_overflows_is_refused(name, chained):
    tx = (HIDING | LETTING_PAST)[name](ls.with_loss_scaling(ADAM))
    state = (optax.chain(CLIP, tx) if chained else tx).init(start_for(name))
    for use in (
        lambda: ls.value_and_grad(lambda p: p["b"], state),
        lambda: ls.grad(lambda p: p["b"], state),
        lambda: ls.scale_loss(1.0, state),
        lambda: ls.unscale_grads(GOOD, state),
    ):
        with pytest.raises(ValueError, match="`state` must have ") as raised:
            use()
        assert f"optax.{name.split()[0]}`" in str(raised.value)
        assert ("trainer's accumulation" in str(raised.value)) == ("Multi" in name)
    assert float(ls.get_loss_scale(state)) == 2.0**15


@pytest.mark.parametrize("name", LETTING_PAST)
def test_loss_scaling_around_those_wrappers_is_accepted(name):
    state = ls.with_loss_scaling(LETTING_PAST[name](ADAM)).init(start_for(name))
    ls.value_and_grad(lambda p: p["b"], state)


def test_a_mask_around_loss_scaling_is_accepted_if_it_freezes_the_rest():
    """A NaN there becomes zero."""
    to_zero = optax.set_to_zero()
    frozen = optax.partition(
        {"train": SCALED, "freeze": to_zero}, {"w": "train", "b": "freeze"}
    )
    beside = optax.chain(optax.masked(SCALED, MASK), optax.masked(to_zero, REST))
    everything = optax.chain(CLIP, optax.masked(SCALED, {"w": True, "b": True}))
    for tx in (frozen, beside, everything):
        ls.value_and_grad(lambda p: p["b"], tx.init(PARAMS))
    assert ls.all_finite(run(frozen, [BAD])[0])
    part = optax.partition({"a": SCALED, "b": SCALED}, {"w": "a", "b": "b"})
    state = part.init(PARAMS).inner_states["a"].inner_state
    ls.value_and_grad(lambda p: p["b"], state)


def test_the_guide_names_nothing_that_is_not_tested():
    rows = table(page("guides/wrappers"), "wrapper")
    named = set(re.findall(r"`optax\.(?:contrib\.)?(\w+)`", str(rows)))
    tested = {name.split(".")[-1] for name in FACTORIES}
    # An earlier optax lacks some of them.
    named = {n for n in named if hasattr(optax, n) or hasattr(optax.contrib, n)}
    assert named <= tested | {"MultiSteps", "inject_hyperparams", "monitor"}
    assert len(named) > 15


# What the guide says of the other order.


@slow
@pytest.mark.parametrize("bad", [BAD, INF], ids=["nan", "inf"])
@pytest.mark.parametrize(
    "before, hides",
    [
        (CLIP, ()),
        (optax.clip_by_block_rms(1.0), ()),
        (optax.adaptive_grad_clip(0.1), ()),
        (optax.clip(1.0), (INF,)),
        (optax.zero_nans(), (BAD,)),
    ],
)
def test_before_loss_scaling_clip_and_zero_nans_hide_bad_gradients(before, hides, bad):
    params, state = run(optax.chain(before, SCALED), [bad])
    hidden = any(bad is x for x in hides)
    assert skipped_steps(state) == (not hidden)
    assert bool(jnp.all(params["w"] == PARAMS["w"])) == (not hidden)


@slow
@pytest.mark.parametrize("name", ["contrib.mechanize", "contrib.sam"])
def test_some_wrappers_around_loss_scaling_take_the_nan(name):
    params, _ = run(LETTING_PAST[name](SCALED), [GOOD, BAD])
    assert np.isnan(params["b"])


@slow
@pytest.mark.parametrize(
    "wrap, skips",
    [
        (HIDING["MultiSteps"], 4),
        (lambda tx: optax.chain(optax.trace(0.9), tx), 8),
        (HIDING["apply_if_finite"], 0),
        (HIDING["MultiSteps that skips"], 0),
        (LETTING_PAST["masked"], 0),
        (LETTING_PAST["partition"], 0),
        (LETTING_PAST["conditionally_transform"], 1),
    ],
)
def test_some_wrappers_around_loss_scaling_keep_a_nan_for_ever_or_hide_it(wrap, skips):
    params, state = run(wrap(SCALED), [BAD] * 2 + [GOOD] * 6)
    assert skipped_steps(state) == skips
    if skips >= 4:
        assert_same_bits(params, PARAMS)
    else:
        assert float(ls.get_loss_scale(state)) == 2.0 ** (15 - skips)


@slow
def test_reduce_on_plateau_outside_counts_a_loss_that_is_not_finite_as_no_progress():
    def scale(tx):
        params, state = PARAMS, tx.init(PARAMS)
        for grads, value in ((GOOD, 1.0), (BAD, jnp.nan), (GOOD, 0.5)):
            updates, state = tx.update(grads, state, params, value=value)
        return float(optax.tree.get(state, "scale"))

    plateau = contrib.reduce_on_plateau(factor=0.5, patience=1)
    assert scale(optax.chain(SCALED, plateau)) == 0.5
    assert scale(ls.with_loss_scaling(optax.chain(SGD, plateau))) == 1.0


def test_flatten_may_stand_around_loss_scaling():
    tx = optax.flatten(ls.with_loss_scaling(ADAM))
    params, state = run(tx, [GOOD, BAD, GOOD])
    assert skipped_steps(state) == 1
    assert_same_bits(params, run(tx, [GOOD, GOOD])[0])


# Hyperparameters, and what reads a state.

SCHEDULE = optax.linear_schedule(1.0, 0.0, 4)


@pytest.mark.parametrize(
    "tx",
    [
        ls.with_loss_scaling(optax.inject_hyperparams(optax.sgd)(SCHEDULE)),
        optax.inject_hyperparams(
            lambda learning_rate: ls.with_loss_scaling(optax.sgd(learning_rate))
        )(learning_rate=SCHEDULE),
        # A rule that could be called would be taken for a schedule.
        optax.inject_hyperparams(
            lambda learning_rate, rule: ls.with_loss_scaling(SGD, rule)
        )(learning_rate=1.0, rule=ls.DynamicLossScale()),
    ],
    ids=["inside", "outside", "with a rule"],
)
def test_inject_hyperparams_on_either_side(tx):
    params, state = run(tx, [GOOD, BAD])
    assert_same_bits(params, run(tx, [GOOD])[0])
    assert not np.array_equal(params["w"], PARAMS["w"])
    assert float(ls.get_loss_scale(state)) == 2.0**14


def test_injected_numbers_of_a_rule_are_refused():
    def make(init_scale):
        rule = ls.DynamicLossScale(init_scale=init_scale)
        return ls.with_loss_scaling(SGD, rule)

    tx = optax.inject_hyperparams(make)(init_scale=64.0)
    with pytest.raises(ValueError, match="`init_scale` must be a plain number, got a"):
        run(tx, [GOOD])


def test_tree_set_and_map_params_see_through_the_wrapper():
    tx = optax.chain(optax.clip(1.0), ls.with_loss_scaling(ADAM))
    state = optax.tree.set(tx.init(PARAMS), loss_scale=jnp.float32(8.0))
    assert float(ls.get_loss_scale(state)) == 8.0
    more = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert_same_bits(ls.get_loss_scale_state(more), ls.get_loss_scale_state(state))
    assert float(more[1].inner_state[0].mu["b"]) == 1.0


def test_accessors_take_the_inner_state():
    plain = contrib.schedule_free_sgd(0.1)
    params, state = run(ls.with_loss_scaling(plain), [GOOD, BAD, GOOD])
    expected_params, expected_state = run(plain, [GOOD, GOOD])
    accessor = contrib.schedule_free_eval_params
    assert_same_bits(
        accessor(state.inner_state, params), accessor(expected_state, expected_params)
    )
