"""What holds of every rule: any state is carried on, in the types of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, assert_same_types
from every_rule import PRESETS, RULES, every_rule

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def step(rule, state, grads_finite, magnitude):
    args = (magnitude,) if rule.uses_max_magnitude else ()
    return rule.update(state, grads_finite, *args)


def test_every_preset_is_here():
    assert PRESETS.keys() == {*presets.__all__}


@every_rule
def test_a_loaded_scale_out_of_range_is_clipped(rule):
    lowest = getattr(rule, "min_scale", SMALLEST)
    highest = getattr(rule, "max_scale", LARGEST)
    constant = isinstance(rule, ls.FixedLossScale)
    for loaded in (SMALLEST, LARGEST):
        state = rule.init()._replace(loss_scale=jnp.float32(loaded))
        for flag in (True, False):
            scale = float(step(rule, state, flag, 2.0**-10).loss_scale)
            if constant:
                assert SMALLEST <= scale <= LARGEST
            else:
                assert lowest <= scale <= highest


@every_rule
def test_counters_saturate(rule):
    most = np.iinfo(np.int32).max
    full = jax.tree.map(
        lambda x: jnp.int32(most) if x.dtype == jnp.int32 else x, rule.init()
    )
    for flag in (True, False):
        for leaf in jax.tree.leaves(step(rule, full, flag, 1.0)):
            assert leaf.dtype != jnp.int32 or int(leaf) >= 0
    state = step(rule, full, False, 1.0)
    assert int(state.skipped_steps) == int(state.consecutive_skips) == most


@every_rule
def test_numbers_of_other_types_are_converted(rule):
    @jax.jit
    def steps(first):
        states = [
            optax.tree.set(first, loss_scale=value, skipped_steps=7.0)
            for value in (8, np.float64(8), jnp.bfloat16(8))
        ]
        states = [step(rule, state, True, 2.0**-10) for state in states]
        for dtype in (jnp.float16, jnp.float32, None):
            cast = jax.tree.map(lambda x, t=dtype: x.astype(t or x.dtype), states[2])
            states.append(step(rule, cast, True, 2.0**-10))
        return states

    first = rule.init()
    states = steps(first)
    for state in states:
        assert_same_types(state, first)
        assert int(state.skipped_steps) == 7
        assert all(np.isfinite(x) for x in jax.tree.leaves(state))
    assert_same_bits(*states[-2:])


X = np.ones(2, np.float32)
HEADROOM = ls.HeadroomLossScale()
STATE = HEADROOM.init()
SEVERAL = jax.tree.map(lambda x: np.stack([x, x]), STATE)
OPT_STATE = ls.with_loss_scaling(optax.sgd(0.1)).init(X)
NOT_STATES = [
    (None, "be a LossScaleState, .* got None"),
    (OPT_STATE, "`get_loss_scale_state` returns"),
    (SEVERAL, "of one run, .* inside `jax.vmap`"),
    (STATE._replace(growth_tracker=SEVERAL.growth_tracker), "one run, .* for `growth"),
    (STATE._replace(growth_tracker=None), "hold numbers, got None for `growth_track"),
    (ls.DynamicLossScale().init(), r"`rule_state` of Headroom.*scale_state=rule.init"),
    (STATE._replace(rule_state=SEVERAL.rule_state), "`rule_state` of Headroom"),
]


@pytest.mark.parametrize(("state", "message"), NOT_STATES)
def test_what_is_no_state_of_one_run_is_refused(state, message):
    error = ValueError if isinstance(state, ls.LossScaleState) else TypeError
    with pytest.raises(error, match=f"^`state` must .*{message}"):
        HEADROOM.update(state, True)


def test_a_rule_leaves_what_another_one_remembered():
    state = HEADROOM.update(STATE, True, 0.25)
    rule = ls.DynamicLossScale()
    for update in (rule.update, jax.jit(rule.update)):
        assert_same_bits(update(state, True).rule_state, state.rule_state)


@dataclasses.dataclass(frozen=True)
class UsersRule(ls.LossScale):
    """It remembers the steps since it began."""

    def init(self):
        return ls.LossScaleState.create(2.0**11, rule_state=jnp.int32(0))

    def update(self, state, grads_finite):
        state = state._replace(rule_state=state.rule_state + 1)
        return state.record(grads_finite)


MOVING = [ls.DynamicLossScale(2.0**13), HEADROOM, presets.deepspeed(), UsersRule()]


@pytest.mark.parametrize("value", [1.0, np.nan], ids=["good", "bad"])
@pytest.mark.parametrize("rule", MOVING, ids=lambda rule: type(rule).__name__)
def test_a_rule_that_takes_over_begins_as_itself(rule, value):
    """A fixed scale is not continued, and a fixed rule continues none."""
    fixed, again, expected = taken_over(rule, value)
    assert float(fixed.loss_scale) == 2.0**10 and bool(fixed.is_fixed)
    assert_same_bits(again, expected)


@functools.partial(jax.jit, static_argnums=0)
def taken_over(rule, value):
    """A fixed rule takes over, and gives back; what the rule does from its start."""

    def opt_state_after(rule, state):
        tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
        state = tx.init(X)._replace(scale_state=state)
        return tx.update(0 * X, state, X, value=value)[1].scale_state

    first = rule.init()._replace(skipped_steps=jnp.int32(7))
    moved = step(rule, first, True, 2.0**-10)._replace(skipped_steps=jnp.int32(7))
    fixed = opt_state_after(ls.FixedLossScale(2.0**10), moved)
    before = {"skipped_steps": jnp.int32(7), "skip_rate": first.skip_rate}
    before["consecutive_skips"] = first.consecutive_skips
    again = opt_state_after(rule, fixed._replace(**before))
    return fixed, again, opt_state_after(rule, first)


def test_a_rule_that_has_no_hash_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Unhashable(UsersRule):
        limits: list = dataclasses.field(default_factory=list)

    with pytest.raises(TypeError, match=r"`rule` must be hashable.*frozen=True"):
        ls.with_loss_scaling(optax.sgd(0.1), Unhashable())


CONSTANT = [ls.FixedLossScale(), ls.FixedLossScale(128.0, skip_nonfinite=False)]


@pytest.mark.parametrize("constant", CONSTANT, ids=repr)
def test_the_scale_of_a_constant_rule_may_be_a_constant(constant):
    state = constant.update(ls.DynamicLossScale().init(), True)
    loss, _ = jax.jit(ls.value_and_grad(lambda x: x**2, state))(3.0)
    assert float(loss) == 9.0


MEASURING = {name: rule for name, rule in RULES.items() if rule.uses_max_magnitude}
every_measuring_rule = pytest.mark.parametrize(
    "rule", MEASURING.values(), ids=MEASURING
)


@every_measuring_rule
def test_a_magnitude_that_is_zero_or_nan_says_nothing(rule):
    """A maximum may be NaN where the flag is False."""
    assert float(rule.update(rule.init(), True, 0.0).loss_scale) == rule.init_scale
    state = rule.update(rule.init(), True, 2.0**-10)
    for flag in (True, False):
        expected = rule.update(state, flag, 0.0)
        assert_same_bits(rule.update(state, flag, jnp.nan), expected)
