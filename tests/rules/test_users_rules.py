"""A user's own rules: they are restored, and one takes over from another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls
from optax_lossscale import presets


@dataclasses.dataclass(frozen=True)
class Halving(ls.LossScale):
    """As the documentation has it, but without limits. It remembers its updates."""

    start: float = 64.0

    def init(self):
        return ls.LossScaleState.create(self.start, rule_state=jnp.int32(0))

    def update(self, state, grads_finite):
        scale = jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale
        return state._replace(rule_state=state.rule_state + 1, loss_scale=scale)


class Counting(ls.LossScale):
    """It counts in itself, which is no state."""

    def __init__(self):
        self.good = 0

    def init(self):
        return ls.LossScaleState.create(8.0)

    def update(self, state, grads_finite):
        self.good += 1
        return state


@dataclasses.dataclass(frozen=True)
class Mistaken(Halving):
    """It counts the wrong steps."""

    def update(self, state, grads_finite):
        return super().update(state, grads_finite).record(~grads_finite)


class Config:
    """It is no mapping, like ``ml_collections.ConfigDict``."""

    def __init__(self, fields):
        self.keys = fields.keys
        self.fields = fields

    def __getitem__(self, name):
        return self.fields[name]


def test_users_rule_is_restored_by_itself_and_by_the_base():
    config = Halving(16.0).get_config()
    assert config == {"class_name": "Halving", "start": 16.0}
    for cls in (Halving, ls.LossScale):
        for given in (config, Config(config)):
            assert cls.from_config(given) == Halving(16.0)


def test_base_restores_a_class_as_last_defined_and_refuses_a_name_of_two():
    """Also two levels below it."""
    former, newest = (
        dataclasses.make_dataclass("Twin", [], bases=(Halving,), frozen=True)
        for _ in range(2)
    )
    config = former().get_config()
    assert type(ls.LossScale.from_config(config)) is newest
    former.__qualname__ = "Other"
    with pytest.raises(ValueError, match=r"'Twin', which is the name of .*Other'.*Cal"):
        ls.LossScale.from_config(config)
    assert {type(x.from_config(config)) for x in (former, newest)} == {former, newest}


def test_rule_without_a_hash_is_refused():
    with pytest.raises(TypeError, match=r"`rule` must be hashable.*frozen=True"):
        ls.with_loss_scaling(optax.sgd(0.1), Halving([64.0]))


GRADS = np.zeros(2, np.float32)
MOVING = [ls.DynamicLossScale(2.0**13), ls.HeadroomLossScale(), presets.deepspeed()]
MOVING += [Halving(2.0**11)]


@functools.partial(jax.jit, static_argnums=0)
def after_one_step(rule, state, value):
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
    opt_state = tx.init(GRADS)._replace(scale_state=state)
    return tx.update(GRADS, opt_state, GRADS, value=value)[1].scale_state


def test_rule_that_changes_in_its_update_is_refused():
    tx = ls.with_loss_scaling(optax.sgd(0.1), Counting())
    with pytest.raises(TypeError, match=r"must not change .*`good`.*state.rule_state"):
        jax.eval_shape(tx.update, GRADS, tx.init(GRADS), GRADS)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize(
    "rule", [ls.DynamicLossScale(), ls.HeadroomLossScale(), Halving()], ids=repr
)
def test_rule_that_finds_no_scale_starts_from_its_own(rule, scale):
    found = rule.init()._replace(loss_scale=jnp.float32(scale))
    assert after_one_step(rule, found, 1.0).loss_scale == rule.init().loss_scale


@dataclasses.dataclass(frozen=True)
class Measuring(Halving):
    """It remembers the magnitude that it gets."""

    uses_max_magnitude = True

    def init(self):
        return ls.LossScaleState.create(self.start, rule_state=jnp.float32(-1))

    def update(self, state, grads_finite, max_magnitude):
        return state._replace(rule_state=max_magnitude)


@pytest.mark.parametrize(("grad", "seen"), [(-3, 3), (np.nan, 0), (np.inf, 0)])
def test_rule_gets_the_largest_magnitude_or_0_in_a_skipped_step(grad, seen):
    tx = ls.with_loss_scaling(optax.identity(), Measuring())
    _, state = tx.update(np.float32([1, grad]), tx.init(GRADS))
    assert state.scale_state.rule_state == seen


def counts(state):
    return int(state.skipped_steps), int(state.consecutive_skips), bool(state.applied)


@pytest.mark.parametrize(
    "rule",
    [Halving(), Mistaken(), ls.DynamicLossScale()],
    ids=lambda x: type(x).__name__,
)
def test_skipped_steps_are_counted_whatever_the_rule_counts(rule):
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
    state, seen = tx.init(GRADS), []
    for grads in (GRADS * np.nan, GRADS * np.nan, GRADS):
        _, state = tx.update(grads, state, GRADS)
        seen.append(counts(state.scale_state))
    assert seen == [(1, 1, False), (2, 2, False), (2, 0, True)]


class Slower(ls.DynamicLossScale):
    def update(self, state, grads_finite):
        state = super().update(state, grads_finite)
        return state._replace(loss_scale=state.loss_scale - 1)


class Static(ls.DynamicLossScale):
    @staticmethod
    def update(state, grads_finite):
        return state._replace(loss_scale=state.loss_scale - 1)


@pytest.mark.parametrize("rule", [Slower, Static])
def test_update_of_a_class_derived_from_a_rule_is_called(rule):
    tx = ls.with_loss_scaling(optax.sgd(0.1), rule(8.0))
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    assert ls.get_loss_scale(state) == 7


def test_step_of_a_rule_that_never_skips_is_applied():
    skipped = ls.DynamicLossScale().init().record(False)
    never = ls.FixedLossScale(8.0, skip_nonfinite=False)
    assert counts(after_one_step(never, skipped, np.nan)) == (1, 0, True)


@pytest.mark.parametrize("value", [1.0, np.nan], ids=["good", "bad"])
@pytest.mark.parametrize("rule", MOVING, ids=lambda rule: type(rule).__name__)
def test_switch_to_a_fixed_scale_and_back_starts_from_the_scale_of_each_rule(
    rule, value
):
    """Only the counts of skips go on."""
    first = rule.init()._replace(skipped_steps=jnp.int32(7))
    moved = after_one_step(rule, first, 1.0)
    fixed = after_one_step(ls.FixedLossScale(2.0**10), moved, value)
    assert float(fixed.loss_scale) == 2.0**10 and bool(fixed.is_fixed)
    counted = ("skipped_steps", "skip_rate", "consecutive_skips")
    before = {name: getattr(first, name) for name in counted}
    again = after_one_step(rule, fixed._replace(**before), value)
    assert_same_bits(again, after_one_step(rule, first, value))


def test_rule_without_a_rule_state_keeps_that_of_another(around):
    rule, other = ls.DynamicLossScale(), ls.HeadroomLossScale()
    state = other.update(other.init(), True, 0.25)
    assert_same_bits(around(rule.update)(state, True).rule_state, state.rule_state)
