"""States of other systems, as their packages saved them: ours goes on like theirs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DATA, assert_same_bits, run_rule

import optax_lossscale as ls
from optax_lossscale import presets

CASES = json.loads((DATA / "saved_states.json").read_text())["cases"]
SYSTEMS = {
    "torch.amp.GradScaler": "torch",
    "jmp.DynamicLossScale": "jmp",
    "flax.training.dynamic_scale.DynamicScale": "flax",
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": "megatron",
    "keras.optimizers.LossScaleOptimizer": "keras",
}


def saved(value):
    """What was saved, where that was an array."""
    if isinstance(value, dict):
        value = np.asarray(jnp.array(value["array"], value["dtype"]))
    return value


# What each system saved first. Keras saves the variables of its inner optimizer, too.
FORMS = {}
for case in reversed(CASES):
    form = {key: saved(value) for key, value in case["saved"].items()}
    FORMS[SYSTEMS[case["system"]]] = form
FORMS["keras"] = {key: FORMS["keras"][key] for key in ("2", "3")}
NUMBERS = [(system, key) for system, form in FORMS.items() for key in form]


def convert_from(system, state_dict, **arguments):
    return getattr(presets, f"from_{system}_state_dict")(state_dict, **arguments)


def convert_to(system, state, rule):
    return getattr(presets, f"to_{system}_state_dict")(state, rule)


@pytest.mark.parametrize("case", CASES, ids=lambda case: SYSTEMS[case["system"]])
def test_a_saved_run_goes_on_as_recorded_and_nothing_is_lost_on_the_way_back(case):
    system = SYSTEMS[case["system"]]
    state_dict = {key: saved(value) for key, value in case["saved"].items()}
    # PyTorch and jmp save their arguments with the state.
    arguments = case["arguments"] if system in ("flax", "megatron", "keras") else {}
    state, rule = convert_from(system, state_dict, **arguments)
    states = run_rule(rule, [flag == "1" for flag in case["then"]], state=state)
    np.testing.assert_allclose(states.loss_scale, case["scale"], rtol=1e-6)

    tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
    opt_state = tx.init({"w": jnp.zeros(2)})._replace(scale_state=state)
    back = convert_to(system, opt_state, rule)
    assert back.keys() == (FORMS["keras"] if system == "keras" else state_dict).keys()
    for key, value in back.items():
        assert value == state_dict[key]
        if isinstance(state_dict[key], np.ndarray):
            assert_same_bits(np.asarray(value), state_dict[key])
        else:
            assert type(value) is type(state_dict[key])


def test_every_pair_of_conversions_is_recorded():
    names = {name.split("_")[1] for name in presets.__all__ if "state_dict" in name}
    assert names == FORMS.keys() == {SYSTEMS[case["system"]] for case in CASES}


@pytest.mark.parametrize(
    ("system", "key", "value", "message"),
    [
        ("torch", "scale", 0.0, r"state_dict\['scale'\]` must be a number from 2"),
        ("keras", "3", np.inf, r"state_dict\['3'\]` must be a number from 2"),
        ("flax", "fin_steps", 1.5, r"state_dict\['fin_steps'\]` must be a whole"),
        ("jmp", "counter", 2**31, r"state_dict\['counter'\]` must be a whole"),
        ("torch", "growth_factor", 0.5, "growth_factor` must be a number above 1"),
        ("jmp", "period", 0, "period` must be a whole number"),
        ("megatron", "extra", 1, r"state_dict` must have the keys \['growth_tr"),
    ],
)
def test_a_saved_form_that_makes_no_sense_is_refused(system, key, value, message):
    with pytest.raises(ValueError, match=f"^`{message}"):
        convert_from(system, {**FORMS[system], key: value})


NOT_NUMBERS = [[8.0], (8.0,), [], "8", b"8", None, True, 1j, {}, np.bool_(True)]
NOT_NUMBERS += [np.ones(2), np.ones(0), np.array("8"), np.array([None]), jnp.ones(2)]


@pytest.mark.parametrize(("system", "key"), NUMBERS)
def test_a_saved_number_is_one_number_or_an_array_of_one_element(system, key):
    form = FORMS[system]
    for value in NOT_NUMBERS:
        with pytest.raises(ValueError) as error:
            convert_from(system, {**form, key: value})
        message = str(error.value)
        assert message.startswith(f"`state_dict[{key!r}]` must be one number, got ")
        assert message.endswith("a number, or an array of one element.")
    for shape in ((1,), (1, 1)):
        value = np.asarray(form[key]).reshape(shape)
        again = convert_from(system, {**form, key: value})
        assert_same_bits(again[0], convert_from(system, form)[0])
        assert again[1] == convert_from(system, form)[1]


@pytest.mark.parametrize("system", FORMS)
def test_a_missing_key_and_what_holds_no_state_are_refused(system):
    with pytest.raises(ValueError, match="`state_dict` must have the keys .* Pass "):
        convert_from(system, {"no key": 1.0})
    with pytest.raises(TypeError, match="`state_dict` must be a dictionary, got"):
        convert_from(system, [1, 2])
    for rule in (ls.DynamicLossScale(), presets.torch_grad_scaler(enabled=False)):
        with pytest.raises(ValueError, match="`state` must contain a LossScaleState"):
            convert_to(system, (), rule)


@pytest.mark.parametrize(
    ("system", "rule", "message"),
    [
        ("torch", ls.DynamicLossScale(hysteresis=2), "hysteresis=1"),
        ("torch", ls.FixedLossScale(8.0), "be a DynamicLossScale"),
        ("torch", presets.deepspeed(delayed_shift=1), "first_growth_late=False"),
        ("keras", presets.mpx_dynamic(2.0**20), "clips_every_step=False"),
        ("keras", ls.DynamicLossScale(growth_factor=4.0), "growth_factor=2.0"),
        ("keras", ls.DynamicLossScale(backoff_factor=0.25), "backoff_factor=0.5"),
        ("jmp", ls.DynamicLossScale(growth_factor=4.0), "backoff_factor=0.25"),
        ("jmp", ls.TolerantLossScale(), "be a DynamicLossScale"),
        ("megatron", ls.DynamicLossScale(hysteresis=2), "hysteresis_refill='growth'"),
        ("megatron", presets.jmp_dynamic(jnp.float16(8)), "scale_dtype='float32'"),
        ("torch", presets.jmp_dynamic(jnp.bfloat16(8)), "scale_dtype='float32'"),
        ("flax", presets.jmp_dynamic(jnp.float16(8)), "scale_dtype='float32'"),
        ("keras", presets.jmp_dynamic(jnp.float16(8)), "scale_dtype='float32'"),
    ],
)
def test_a_rule_that_the_system_cannot_follow_is_refused(system, rule, message):
    with pytest.raises(ValueError, match=rf"^`rule` must .*{message}.* follow it, got"):
        convert_to(system, rule.init(), rule)


@pytest.mark.parametrize("system", FORMS)
def test_a_state_that_is_not_that_of_one_run_is_refused_with_the_way_out(system):
    rule = presets.megatron()
    ensemble = jax.vmap(lambda _: rule.init())(jnp.ones(3))
    rule = rule if system == "megatron" else presets.mindspore_dynamic()
    refused = {
        "of one run, got an array.* `jax.tree.map": ensemble,
        "hold numbers, got .* no number .* Pass": jax.eval_shape(rule.init),
    }
    for message, state in refused.items():
        with pytest.raises(ValueError, match=f"^`state` must .*{message}"):
            convert_to(system, state, rule)
    with pytest.raises(ValueError, match="^`state` must hold concrete numbers, got .*"):
        jax.jit(lambda state: convert_to(system, state, rule))(rule.init())
    member = jax.tree.map(lambda x: x[0], ensemble)
    assert convert_to(system, member, rule)
