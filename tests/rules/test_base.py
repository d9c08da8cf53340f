"""LossScale: configuration, a user's own rules, one program for equal rules."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ls
from optax_lossscale._rules import base, fixed


def test_rules_are_frozen_printable_and_not_callable():
    rule = ls.FixedLossScale(8.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.loss_scale = 4.0
    assert repr(rule) == "FixedLossScale(loss_scale=8.0, skip_nonfinite=True)"
    for cls in (ls.LossScale, ls.FixedLossScale, ls.DynamicLossScale):
        assert "__call__" not in dir(cls) or cls.__call__ is type(cls).__call__
        assert not callable(ls.FixedLossScale()) and not callable(ls.DynamicLossScale())


def test_equal_values_of_different_rules_differ():
    assert ls.FixedLossScale(1.0) != ls.FixedLossScale(2.0)
    assert ls.FixedLossScale() != ls.DynamicLossScale()


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ls.LossScale()


def test_missing_fields_take_their_defaults():
    assert ls.FixedLossScale.from_config({}) == ls.FixedLossScale()


@pytest.mark.parametrize(
    ("cls", "config", "error", "message"),
    [
        (ls.LossScale, [], TypeError, "`config` must be a dictionary"),
        (ls.LossScale, {}, ValueError, "must be one of"),
        (ls.LossScale, {"class_name": ["x"]}, ValueError, "must be one of"),
        (
            ls.LossScale,
            {"class_name": "Nope"},
            ValueError,
            "got 'Nope'. `LossScale.from_config`",
        ),
        (ls.FixedLossScale, {"class_name": "DynamicLossScale"}, ValueError, "Fixed"),
        (ls.FixedLossScale, {"scale": 1.0}, ValueError, r"\['scale'\]"),
        (ls.FixedLossScale, {"loss_scale": 0}, ValueError, "`loss_scale` must be"),
    ],
)
def test_a_bad_config_is_refused(cls, config, error, message):
    with pytest.raises(error, match=message):
        cls.from_config(config)


@dataclasses.dataclass(frozen=True)
class Halving(ls.LossScale):
    """A user's rule, in the form that the documentation gives."""

    start: float = 64.0

    def init(self):
        return ls.LossScaleState.create(self.start)

    def update(self, state, grads_finite):
        scale = jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale
        return state.record(grads_finite)._replace(loss_scale=scale)


def test_a_users_rule_restores_itself_and_the_base_only_those_of_the_package():
    """Whatever else is in memory, a configuration means one rule."""
    rule = Halving(16.0)
    config = rule.get_config()
    assert config == {"class_name": "Halving", "start": 16.0}
    assert Halving.from_config(config) == rule
    assert float(rule.update(rule.init(), False).loss_scale) == 8.0
    with pytest.raises(ValueError, match="'Halving'.*call `from_config` on the rule's"):
        ls.LossScale.from_config(config)

    @dataclasses.dataclass(frozen=True)
    class DynamicLossScale(ls.LossScale):
        init, update = Halving.init, Halving.update

    assert ls.LossScale.from_config({"class_name": "DynamicLossScale"}) == (
        ls.DynamicLossScale()
    )
    assert type(DynamicLossScale.from_config({})) is DynamicLossScale


def test_a_rule_that_is_no_dataclass_is_told_how_to_become_one():
    class Plain(ls.LossScale):
        def init(self):
            return ls.LossScaleState.create(1.0)

        def update(self, state, grads_finite):
            return state.record(grads_finite)

    with pytest.raises(TypeError, match="Plain must be a dataclass"):
        Plain().get_config()
    assert float(Plain().init().loss_scale) == 1.0


def test_update_is_compiled_once_for_equal_rules_and_the_flag_checked_once():
    traces, checks = [], []
    check_flag, recorded = base.check_flag, fixed.recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed, "recorded", lambda *x: traces.append(x) or recorded(*x))
        patch.setattr(base, "check_flag", lambda *x: checks.append(x) or check_flag(*x))
        for _ in range(3):
            rule = ls.FixedLossScale(1234.0)
            rule.update(rule.init(), jnp.bool_(True))
    assert (len(traces), len(checks)) == (1, 3)


def test_an_eager_update_moves_nothing_between_host_and_device():
    rule = ls.DynamicLossScale()
    state, flag = rule.init(), jnp.bool_(False)
    with jax.transfer_guard("disallow"):
        rule.update(state, flag)
