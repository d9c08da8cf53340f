"""LossScale: configuration, a user's own rules, one program for equal rules."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_bits

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
        (ls.FixedLossScale, {1: 2, "x": 3}, ValueError, r"must hold only .*\[1, 'x'\]"),
        (ls.LossScale, {"class_name": "FixedLossScale", None: 1}, ValueError, "None"),
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


def scheduled(max_scale):
    rule = ls.DynamicLossScale(
        init_scale=1000.0, max_scale=max_scale, growth_interval=1
    )
    return ls.with_loss_scaling(optax.sgd(0.1), rule)


def test_an_injected_schedule_compiles_nothing_after_the_first_steps(caplog):
    schedule = optax.linear_schedule(2000.0, 10000.0, 8)
    tx = optax.inject_hyperparams(scheduled)(max_scale=schedule)
    params = {"w": jnp.ones(3)}
    opt_state, programs, scales = tx.init(params), [], []
    for _ in range(8):
        caplog.clear()
        with jax.log_compiles():
            _, opt_state = tx.update(params, opt_state)
        compiled = [r for r in caplog.records if "Compiling" in r.getMessage()]
        programs.append(len(compiled))
        scales.append(float(ls.get_loss_scale(opt_state)))
    assert programs[0] > 0, "meta-test: what is compiled is counted"
    assert sum(programs[2:]) == 0
    assert scales == [2000 + 1000 * count for count in range(8)]


def test_a_rule_of_arrays_is_updated_under_a_transfer_guard():
    rule = ls.DynamicLossScale()
    state, flag, limit = rule.init(), jnp.bool_(True), jnp.float32(2.0**14)
    interval = jnp.int32(1)
    with jax.transfer_guard("disallow"):
        rule = ls.DynamicLossScale(
            init_scale=limit, max_scale=limit, growth_interval=interval
        )
        new_state = rule.update(state, flag)
    assert float(new_state.loss_scale) == 2.0**15


@pytest.mark.parametrize(
    ("make", "fields", "args"),
    [
        (ls.DynamicLossScale, {"growth_factor": 1.7, "hysteresis": 3}, ()),
        (ls.FixedLossScale, {"loss_scale": 3.0}, ()),
        (ls.HeadroomLossScale, {"headroom": 2.0, "half_life": 7}, (0.3,)),
        (ls.TolerantLossScale, {"tolerance": 0.3, "growth_interval": 2}, ()),
    ],
)
def test_a_rule_of_arrays_is_the_same_as_one_of_pythons_numbers(make, fields, args):
    fields = {name: float(jnp.float32(x)) for name, x in fields.items()}
    rule = make(**fields)
    of_arrays = make(**{name: jnp.float32(x) for name, x in fields.items()})
    assert of_arrays == rule and hash(of_arrays) == hash(rule)
    assert repr(of_arrays) == repr(rule)
    assert of_arrays.get_config() == rule.get_config()
    for same in (
        of_arrays,
        copy.deepcopy(of_arrays),
        pickle.loads(pickle.dumps(of_arrays)),
        dataclasses.replace(of_arrays),
    ):
        assert same == rule and isinstance(same, make)
        ours, theirs = rule.init(), same.init()
        for flag in (True, True, False):
            ours, theirs = (
                rule.update(ours, flag, *args),
                same.update(theirs, flag, *args),
            )
            assert_same_bits(theirs, ours)
