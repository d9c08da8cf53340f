"""States of other systems, as their packages saved them: ours goes on like theirs."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DATA, assert_same_bits, run_rule

import optax_lossscale as ls
from optax_lossscale import presets

RECORDED = json.loads((DATA / "saved_states.json").read_text())
CASES = RECORDED["cases"]
SYSTEMS = {
    "torch.amp.GradScaler": "torch",
    "jmp.DynamicLossScale": "jmp",
    "flax.training.dynamic_scale.DynamicScale": "flax",
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": "megatron",
    "keras.optimizers.LossScaleOptimizer": "keras",
}


def saved(case):
    """The saved form, with arrays for the arrays in it."""
    return {
        key: np.asarray(jnp.array(value["array"], value["dtype"]))
        if isinstance(value, dict)
        else value
        for key, value in case["saved"].items()
    }


def convert(case, state_dict):
    system = SYSTEMS[case["system"]]
    # PyTorch and jmp save their arguments with the state.
    arguments = case["arguments"] if system in ("flax", "megatron", "keras") else {}
    return getattr(presets, f"from_{system}_state_dict")(state_dict, **arguments)


def case_id(case):
    arguments = ",".join(f"{k}={v:g}" for k, v in case["arguments"].items())
    return f"{SYSTEMS[case['system']]}-{arguments}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_run_goes_on_as_recorded(case):
    state, rule = convert(case, saved(case))
    assert rule.init()._fields == state._fields
    states = run_rule(rule, [flag == "1" for flag in case["then"]], state=state)
    np.testing.assert_allclose(states.loss_scale, case["scale"], rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_nothing_is_lost_on_the_way_there_and_back(case):
    d = saved(case)
    state, rule = convert(case, d)
    back = getattr(presets, f"to_{SYSTEMS[case['system']]}_state_dict")
    tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
    opt_state = tx.init({"w": jnp.zeros(2)})._replace(scale_state=state)
    for form in (back(state, rule), back(opt_state, rule)):
        if "3" in form:
            # Keras keeps the variables of the optimizer inside along with them.
            d = {key: d[key] for key in form}
        assert form.keys() == d.keys()
        for key, value in form.items():
            assert value == d[key], key
            if isinstance(d[key], np.ndarray):
                assert (value.dtype, value.shape) == (d[key].dtype, d[key].shape)
            else:
                assert type(value) is type(d[key])


def test_every_pair_of_conversions_is_recorded():
    names = {
        name.split("_")[1] for name in presets.__all__ if name.endswith("_state_dict")
    }
    assert names == {SYSTEMS[case["system"]] for case in CASES}


def test_jmp_itself_goes_on_from_our_state():
    jmp = pytest.importorskip("jmp")
    rule = ls.DynamicLossScale(growth_interval=3)
    state = rule.init()
    for flag in (True, True, False, True):
        state = rule.update(state, flag)
    theirs = jmp.DynamicLossScale(**presets.to_jmp_state_dict(state, rule))
    for flag in (True, True, True, False):
        state, theirs = rule.update(state, flag), theirs.adjust(jnp.bool_(flag))
        assert float(theirs.loss_scale) == float(state.loss_scale)


def test_flax_itself_goes_on_from_our_state():
    from flax import serialization
    from flax.training.dynamic_scale import DynamicScale

    rule = presets.flax_dynamic_scale(growth_interval=2)
    state = rule.init()
    for flag in (True, False, True):
        state = rule.update(state, flag)
    theirs = serialization.from_state_dict(
        DynamicScale(growth_interval=2), presets.to_flax_state_dict(state, rule)
    )
    for slope in (1.0, 1.0, np.inf, 1.0):
        state = rule.update(state, bool(np.isfinite(slope)))
        value_and_grad = theirs.value_and_grad(lambda p, slope=slope: slope * p)
        theirs = value_and_grad(jnp.float32(1.0)).dynamic_scale
        assert float(theirs.scale) == float(state.loss_scale)


TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scale": 0.0},
            r"`state_dict\['scale'\]` must be a number from 2\*\*-126 .* fresh",
        ),
        ({"scale": float("inf")}, r"`state_dict\['scale'\]` must be"),
        ({"scale": "1024"}, r"`state_dict\['scale'\]` must be"),
        ({"scale": np.ones(2)}, r"`state_dict\['scale'\]` must be"),
        (
            {"_growth_tracker": 1.5},
            r"`state_dict\['_growth_tracker'\]` must be a whole number",
        ),
        ({"_growth_tracker": 2**31}, r"`state_dict\['_growth_tracker'\]` must be"),
        ({"growth_factor": 0.5}, "`growth_factor` must be a number above 1"),
        ({"growth_interval": 0}, "`growth_interval` must be a whole number"),
        ({"extra": 1}, r"must have the keys .* got .*'extra'"),
    ],
)
def test_a_saved_form_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        presets.from_torch_state_dict({**TORCH, **change})


FORMS = {
    "torch": TORCH,
    "jmp": {
        "loss_scale": jnp.float16(1024.0),
        "counter": jnp.int32(7),
        "period": 2000,
        "factor": 2,
        "min_loss_scale": jnp.float16(1.0),
    },
    "flax": {"scale": 1024.0, "fin_steps": 7},
    "megatron": {"scale": 1024.0, "growth_tracker": 7, "hysteresis_tracker": 1},
    "keras": {"2": 7, "3": 1024.0},
}
NOT_NUMBERS = [[8.0], (8.0,), [], "8", b"8", None, True, 1j, {}, np.bool_(True)]
NOT_NUMBERS += [np.ones(2), np.ones(0), np.array("8"), np.array([None]), jnp.ones(2)]
NUMBERS = [(system, key) for system, form in FORMS.items() for key in form]


@pytest.mark.parametrize(("system", "key"), NUMBERS)
def test_a_saved_number_that_is_none_is_refused_by_its_key(system, key):
    convert_from = getattr(presets, f"from_{system}_state_dict")
    for value in NOT_NUMBERS:
        with pytest.raises(ValueError) as error:
            convert_from({**FORMS[system], key: value})
        message = str(error.value)
        assert message.startswith(f"`state_dict[{key!r}]` must be one number, got ")
        assert message.endswith("a number, or an array of one element.")


@pytest.mark.parametrize(("system", "key"), NUMBERS)
def test_a_saved_number_may_be_an_array_of_one_element(system, key):
    convert_from = getattr(presets, f"from_{system}_state_dict")
    form = FORMS[system]
    state, rule = convert_from(form)
    for shape in ((1,), (1, 1)):
        value = np.asarray(form[key]).reshape(shape)
        again, same = convert_from({**form, key: value})
        assert_same_bits(again, state)
        assert same == rule


def test_a_missing_key_and_no_dictionary_are_refused():
    with pytest.raises(ValueError, match=r"must have the keys .*got \['scale'\]"):
        presets.from_torch_state_dict({"scale": 1.0})
    for convert_from in (presets.from_torch_state_dict, presets.from_keras_state_dict):
        with pytest.raises(TypeError, match="`state_dict` must be a dictionary, got"):
            convert_from([1, 2])


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("torch", ls.DynamicLossScale(hysteresis=2), "hysteresis=1"),
        ("torch", ls.FixedLossScale(8.0), "be a DynamicLossScale"),
        ("torch", presets.deepspeed(delayed_shift=1), "first_growth_late=False"),
        ("keras", ls.DynamicLossScale(growth_factor=4.0), "growth_factor=2.0"),
        ("jmp", ls.DynamicLossScale(growth_factor=4.0), "backoff_factor=0.25"),
        ("megatron", ls.DynamicLossScale(hysteresis=2), "hysteresis_refill='growth'"),
        ("flax", ls.HeadroomLossScale(), "be a DynamicLossScale"),
        ("jmp", presets.fairseq(tolerance=0.1), "be a DynamicLossScale"),
    ],
)
def test_a_rule_that_the_system_cannot_follow_is_refused(name, rule, message):
    with pytest.raises(ValueError, match=rf"^`rule` must .*{message}.* follow it, got"):
        getattr(presets, f"to_{name}_state_dict")(rule.init(), rule)
