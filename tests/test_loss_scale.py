"""LossScale and FixedLossScale: configuration, and the rule that stands still."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ls

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "128", None, 1j, [128.0]]


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0, -1, 0.5, 0.999, 2.0**127, 10**400])
def test_a_bad_scale_is_refused_with_a_way_out(value):
    with pytest.raises(ValueError, match="`loss_scale` must be a number from 1") as e:
        ls.FixedLossScale(value)
    assert repr(value) in str(e.value) and "use 1" in str(e.value)


@pytest.mark.parametrize("value", [None, 1, 0, "no", np.bool_(True)])
def test_skip_nonfinite_must_be_a_bool(value):
    with pytest.raises(ValueError, match="`skip_nonfinite` must be True or False"):
        ls.FixedLossScale(skip_nonfinite=value)


@pytest.mark.parametrize(
    "value",
    [
        128,
        np.float32(128),
        np.int64(128),
        np.asarray(128.0),
        ml_dtypes.bfloat16(128),
        jnp.float32(128),
    ],
)
def test_any_kind_of_number_becomes_a_python_float(value):
    rule = ls.FixedLossScale(value)
    assert type(rule.loss_scale) is float
    assert rule == ls.FixedLossScale(128.0) == ls.FixedLossScale()
    assert hash(rule) == hash(ls.FixedLossScale())


@given(st.floats(1, 2.0**100), st.lists(st.booleans(), max_size=8))
def test_the_fixed_scale_never_changes_and_skips_are_counted(scale, flags):
    rule = ls.FixedLossScale(scale)
    state = rule.init()
    for grads_finite in flags:
        state = rule.update(state, grads_finite)
        assert bool(state.grads_finite) == grads_finite
        assert state.loss_scale == np.float32(scale)
    assert int(state.skipped_steps) == flags.count(False)


def test_without_skipping_nothing_is_recorded():
    rule = ls.FixedLossScale(skip_nonfinite=False)
    state = rule.update(rule.init(), False)
    assert bool(state.grads_finite) and int(state.skipped_steps) == 0


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


CONFIGURED = [
    ls.FixedLossScale(),
    ls.FixedLossScale(1024, skip_nonfinite=False),
    ls.DynamicLossScale(),
    ls.DynamicLossScale(min_scale=2.0**-10, hysteresis=2, hysteresis_refill="change"),
]


@pytest.mark.parametrize("rule", CONFIGURED, ids=str)
def test_config_survives_json_through_the_base_and_through_the_class(rule):
    config = json.loads(json.dumps(rule.get_config()))
    assert config["class_name"] == type(rule).__name__
    assert ls.LossScale.from_config(config) == rule
    assert type(rule).from_config(config) == rule
    del config["class_name"]
    assert type(rule).from_config(config) == rule


def test_missing_fields_take_their_defaults():
    assert ls.FixedLossScale.from_config({}) == ls.FixedLossScale()


@pytest.mark.parametrize(
    ("cls", "config", "error", "message"),
    [
        (ls.LossScale, [], TypeError, "`config` must be a dictionary"),
        (ls.LossScale, {}, ValueError, "must name exactly one of"),
        (ls.LossScale, {"class_name": "Nope"}, ValueError, "'Nope', which names 0"),
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


def test_a_users_rule_has_a_config_and_is_found_by_name():
    rule = Halving(16.0)
    assert rule.get_config() == {"class_name": "Halving", "start": 16.0}
    assert ls.LossScale.from_config(rule.get_config()) == rule
    assert float(rule.update(rule.init(), False).loss_scale) == 8.0


def test_a_class_defined_again_in_a_notebook_replaces_the_first():
    def define(value):
        @dataclasses.dataclass(frozen=True)
        class Redefined(Halving):
            start: float = value

        return Redefined

    _first, second = define(1.0), define(2.0)
    found = ls.LossScale.from_config({"class_name": "Redefined"})
    assert type(found) is second


def test_two_rules_of_one_name_in_different_modules_are_refused():
    class Twin(Halving):
        pass

    class Other(Halving):
        pass

    Other.__name__, Other.__module__ = "Twin", "elsewhere"
    with pytest.raises(ValueError, match="'Twin', which names 2"):
        ls.LossScale.from_config({"class_name": "Twin"})
    assert type(Twin.from_config({"start": 2.0})) is Twin


def test_a_rule_that_is_no_dataclass_is_told_how_to_become_one():
    class Plain(ls.LossScale):
        def init(self):
            return ls.LossScaleState.create(1.0)

        def update(self, state, grads_finite):
            return state.record(grads_finite)

    with pytest.raises(TypeError, match="Plain must be a dataclass"):
        Plain().get_config()
    assert float(Plain().init().loss_scale) == 1.0


def test_update_is_compiled_once_for_equal_rules():
    traces = []
    original = ls.LossScaleState.record

    def counting(self, grads_finite):
        traces.append(grads_finite)
        return original(self, grads_finite)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ls.LossScaleState, "record", counting)
        for _ in range(3):
            rule = ls.FixedLossScale(1234.0)
            rule.update(rule.init(), jnp.bool_(True))
    assert len(traces) == 1


def test_an_eager_update_moves_nothing_between_host_and_device():
    rule = ls.DynamicLossScale()
    state, flag = rule.init(), jnp.bool_(False)
    with jax.transfer_guard("disallow"):
        rule.update(state, flag)
