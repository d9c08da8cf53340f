"""Replay what other loss scalers did, and go on from what they saved.

``tests/data/peer_traces.json.xz`` says in its own ``format`` what it holds.
"""

import functools
import json
from operator import itemgetter

import jax
import numpy as np
import optax
import pytest
from shared import DATA, recordings, slow_but
from training import run_rule

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126

# DeepSpeed since 2025 grows one step later after the start and after an overflow.
TRACES = [
    case
    for case in recordings("peer_traces")["cases"]
    if not case["family"].startswith("late_first")
]


RULE_OF_SYSTEM = {
    "apex.amp.scaler.LossScaler": presets.apex_amp,
    # DeepSpeed has made its own of this one.
    "apex.fp16_utils.loss_scaler.DynamicLossScaler": functools.partial(
        presets.deepspeed, delayed_shift=1
    ),
    "amp_C.update_scale_hysteresis (Apex kernel)": functools.partial(
        ls.DynamicLossScale, min_scale=SMALLEST, max_scale=LARGEST
    ),
    "deepspeed.DynamicLossScaler": presets.deepspeed,
    "jmp.DynamicLossScale": presets.jmp_dynamic,
    "mpx.DynamicLossScaling": presets.mpx_dynamic,
    "flax.training.dynamic_scale.DynamicScale": presets.flax_dynamic_scale,
    "keras.optimizers.LossScaleOptimizer": presets.keras_loss_scale,
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": presets.megatron,
    "mindspore.amp.DynamicLossScaleManager": presets.mindspore_dynamic,
    "mindspore.nn.DynamicLossScaleUpdateCell": presets.mindspore_dynamic,
    "mindspore.amp.DynamicLossScaler": presets.mindspore_dynamic,
    "tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager": (
        presets.tf_contrib_exponential_update
    ),
    "tf.compat.v1.mixed_precision.DynamicLossScale": presets.tf_dynamic_loss_scale,
    "tf_keras.mixed_precision.LossScaleOptimizer": presets.tf_keras_loss_scale,
    "torch.amp.GradScaler": presets.torch_grad_scaler,
}


def flags(text):
    return np.array([*text]) == "1"


# Other names of one argument, and what is none.
RENAMED = dict.fromkeys(["loss_scale_value", "scale_value"], "init_loss_scale")
RENAMED |= {"current_scale": "init_scale", "inner_optimizer": None, "applied": None}


def rule_of(case):
    native = case["native_arguments"].items()
    arguments = {RENAMED.get(name, name): value for name, value in native}
    arguments.pop(None, None)
    if case["system"].startswith("jmp"):
        # jmp forgets its floor under jit; recorded is what took effect.
        arguments["min_loss_scale"] = case["hyperparameters"]["min_scale"]
    return RULE_OF_SYSTEM[case["system"]](**arguments)


def begins_in_range(case):
    """In float32, where gradients are divided, a larger scale is inf.

    Below the smallest one of a rule, an overflow would raise it.
    """
    least = case["hyperparameters"]["min_scale"] or 0
    return least <= case["scale_before_first_step"] <= LARGEST


RUNS = [case for case in TRACES if begins_in_range(case)]
REFUSED = [case for case in TRACES if not begins_in_range(case)]
ONE_OF_EACH_KIND = {(case["system"], case["family"]): case for case in RUNS}.values()


def test_table_has_every_system_that_is_recorded():
    assert {case["system"] for case in RUNS} == RULE_OF_SYSTEM.keys()


@pytest.mark.parametrize("case", REFUSED, ids=itemgetter("id"))
def test_preset_refuses_a_first_scale_out_of_range(case):
    with pytest.raises(ValueError, match="scal(e|ing)` must be a number from "):
        rule_of(case)


@pytest.mark.parametrize("case", slow_but(ONE_OF_EACH_KIND, RUNS), ids=itemgetter("id"))
def test_rule_takes_the_recorded_course(case):
    rule = rule_of(case)
    assert rule.init().loss_scale == np.float32(case["scale_before_first_step"])
    states = run_rule(rule, flags(case["finite"]))
    # Below our range a peer divides 0 by 0; above it the reciprocal is flushed to zero,
    # and at infinity every later step overflows. Ours stays in it.
    scale = np.array(case["scale"], np.float64)
    steps = np.cumprod((scale >= SMALLEST) & (scale <= LARGEST)).sum()
    np.testing.assert_allclose(states.loss_scale[:steps], scale[:steps], rtol=1e-5)
    # Some peers count no finite steps, or do not say what they applied.
    if count := case.get("growth_count"):
        np.testing.assert_array_equal(states.growth_tracker[:steps], count[:steps])
    if applied := case.get("applied"):
        np.testing.assert_array_equal(states.applied[:steps], flags(applied)[:steps])


TRAININGS = recordings("torch_end_to_end")["cases"]


@pytest.mark.usefixtures("new_process")  # else it warns that no loss was scaled
@pytest.mark.parametrize("case", TRAININGS, ids=itemgetter("id"))
def test_training_takes_the_course_of_torch(case):
    """Fed with torch's scaled gradients, optimizer and scale do what torch's did."""
    steps = case["steps"]
    make = {"SGD": optax.sgd, "Adam": optax.adam}[case["optimizer"]]
    inner = make(*case["optimizer_arguments"].values())
    if case["clip_global_norm"] is not None:
        inner = optax.chain(optax.clip_by_global_norm(case["clip_global_norm"]), inner)
    rule = presets.torch_grad_scaler(**case["scaler_arguments"])
    tx = ls.with_loss_scaling(inner, rule)

    def step(carry, scaled_grads):
        params, opt_state = carry
        grads = ls.unscale_grads(scaled_grads, opt_state)
        scale_used = ls.get_loss_scale(opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (params, scale_used, opt_state.scale_state)

    params = np.float32(case["initial_params"])
    carry, scaled_grads = (params, tx.init(params)), np.float32(steps["scaled_grads"])
    params, scale_used, states = jax.lax.scan(step, carry, scaled_grads)[1]

    assert "0" in steps["applied"], "meta-test: some steps are skipped"
    np.testing.assert_array_equal(scale_used, steps["scale_used"])
    np.testing.assert_array_equal(states.loss_scale, steps["scale_after"])
    np.testing.assert_array_equal(states.growth_tracker, steps["growth_count_after"])
    np.testing.assert_array_equal(states.applied, flags(steps["applied"]))
    # optax corrects Adam's bias in float32, torch in float64.
    tolerance = {"rtol": 1e-5, "atol": 5e-7 if case["optimizer"] == "SGD" else 2e-5}
    np.testing.assert_allclose(params, steps["params"], **tolerance)


# What they save, by the names of our state. The rest of what jmp saves are arguments.
FIELDS = dict.fromkeys(["scale", "loss_scale", "3"], "loss_scale")
COUNTERS = ("growth_tracker", "_growth_tracker", "counter", "fin_steps", "2")
FIELDS |= dict.fromkeys(COUNTERS, "growth_tracker")
FIELDS["hysteresis_tracker"] = "hysteresis_tracker"
SAVED = json.loads((DATA / "saved_states.json").read_text())["cases"]


def array(value):
    """What was saved, where that was an array."""
    return np.array(value["array"], value["dtype"]) if type(value) is dict else value


@pytest.mark.parametrize("case", slow_but(SAVED[::2], SAVED), ids=itemgetter("system"))
def test_saved_run_goes_on_as_recorded(case):
    """From the first state of its preset, with the saved scale and counters in it."""
    system, arguments = case["system"], case["arguments"]
    saved = {key: array(value) for key, value in case["saved"].items()}
    if system.startswith("jmp"):
        arguments = {k: v for k, v in saved.items() if k != "counter"}
    rule = RULE_OF_SYSTEM[system](**arguments)
    numbers = {FIELDS[x]: np.ravel(saved[x])[0] for x in saved.keys() & FIELDS}
    state = rule.init()._replace(**numbers)
    states = run_rule(rule, flags(case["then"]), state=state)
    np.testing.assert_allclose(states.loss_scale, case["scale"], rtol=1e-6)
