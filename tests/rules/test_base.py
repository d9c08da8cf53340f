"""LossScale: configuration, a user's own rules, and what `update` is given."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_rule import RULES

import optax_lossscale as ls


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_configuration_goes_through_json_and_comes_back_equal(rule):
    config = json.loads(json.dumps(rule.get_config(), allow_nan=False))
    again = ls.LossScale.from_config(config)
    assert again == rule and hash(again) == hash(rule) and repr(again) == repr(rule)
    assert config.pop("class_name") == type(rule).__name__
    assert type(rule).from_config(config) == rule
    assert not callable(rule), "`inject_hyperparams` would take it for a schedule"


def test_rules_are_frozen_and_equal_by_class_and_numbers():
    rule = ls.FixedLossScale(8.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.loss_scale = 4.0
    assert repr(rule) == "FixedLossScale(loss_scale=8.0, skip_nonfinite=True)"
    distinct = {repr(rule): rule for rule in RULES.values()}.values()
    assert len(set(distinct)) == len(distinct)
    with pytest.raises(TypeError, match="abstract"):
        ls.LossScale()


@pytest.mark.parametrize(
    ("cls", "config", "message"),
    [
        (ls.LossScale, {}, "must be one of"),
        (ls.LossScale, {"class_name": "UnknownLossScale"}, "must be one of"),
        (ls.FixedLossScale, {"class_name": "DynamicLossScale"}, "Fixed"),
        (ls.FixedLossScale, {"scale": 1.0}, "unexpected keyword argument 'scale'"),
    ],
)
def test_a_bad_config_is_refused(cls, config, message):
    with pytest.raises((TypeError, ValueError), match=message):
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


def test_a_users_rule_is_restored_by_itself_and_by_the_base():
    config = Halving(16.0).get_config()
    assert config == {"class_name": "Halving", "start": 16.0}
    for cls in (Halving, ls.LossScale):
        assert cls.from_config(config) == Halving(16.0)
    with pytest.raises(ValueError, match="must be one of .'FixedLossScale'., got"):
        ls.FixedLossScale.from_config(config)


def define_twin():
    @dataclasses.dataclass(frozen=True)
    class Twin(Halving):
        """Two levels below the base."""

    return Twin


def test_the_base_restores_the_newest_of_a_class_but_asks_which_of_two():
    former, newest = define_twin(), define_twin()
    config = former().get_config()
    assert type(ls.LossScale.from_config(config)) is newest
    former.__qualname__ = "Other"
    with pytest.raises(ValueError, match=r"'Twin', which is that of .*Other'.* Call"):
        ls.LossScale.from_config(config)
    assert {type(x.from_config(config)) for x in (former, newest)} == {former, newest}


@pytest.mark.parametrize("rule", [ls.DynamicLossScale(), ls.HeadroomLossScale()])
def test_an_eager_update_moves_nothing_between_host_and_device(rule):
    args = rule.init(), jnp.bool_(False), *[jnp.float32(1)] * rule.uses_max_magnitude
    with jax.transfer_guard("disallow"):
        rule.update(*args)


@pytest.mark.parametrize("value", [np.ones(2), True])
def test_a_magnitude_that_is_no_number_is_refused(value):
    rule = ls.HeadroomLossScale()
    with pytest.raises(ValueError, match="`max_magnitude` must be one real number"):
        rule.update(rule.init(), True, value)
