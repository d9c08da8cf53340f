"""Replay what was recorded from other loss scalers, with the presets of their names.

``tests/data/peer_traces.json.xz`` says in its own ``format`` what it holds.
"""

import json
import lzma
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DATA, run_rule

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def load(name):
    return json.loads(lzma.decompress((DATA / f"{name}.json.xz").read_bytes()))


TRACES = load("peer_traces")["cases"]
TRAININGS = load("torch_end_to_end")["cases"]


def torch_kernel(current_scale, **arguments):
    return ls.DynamicLossScale(
        init_scale=current_scale, min_scale=SMALLEST, max_scale=LARGEST, **arguments
    )


def jmp(case):
    arguments = dict(case["native_arguments"])
    if arguments["min_loss_scale"] == "default (1)":
        del arguments["min_loss_scale"]
    if case.get("mode") == "jit_with_min":
        # jmp forgets its floor under jit; recorded is what took effect.
        arguments["min_loss_scale"] = case["hyperparameters"]["min_scale"]
    dtype = jnp.dtype(case["arithmetic"])
    arguments["loss_scale"] = jnp.asarray(arguments["loss_scale"], dtype)
    return presets.jmp_dynamic(**arguments)


def keras(case):
    names = ("initial_scale", "dynamic_growth_steps")
    return presets.keras_loss_scale(*(case["native_arguments"][n] for n in names))


def deepspeed(case):
    late = case["family"].startswith("late_first")
    return presets.deepspeed(**case["native_arguments"], first_growth_late=late)


def apex_fp16_utils(init_scale, scale_factor, scale_window):
    # The rule of MindSpore's manager, under other names.
    return presets.mindspore_dynamic(init_scale, scale_factor, scale_window)


def with_arguments(preset, **renamed):
    """A function of a case: the preset with its native arguments."""

    def build(case):
        arguments = case["native_arguments"].items()
        return preset(**{renamed.get(name, name): x for name, x in arguments})

    return build


PRESETS = {
    "apex.amp.scaler.LossScaler": with_arguments(presets.apex_amp),
    "apex.fp16_utils.loss_scaler.DynamicLossScaler": with_arguments(apex_fp16_utils),
    "amp_C.update_scale_hysteresis (Apex kernel)": with_arguments(torch_kernel),
    "deepspeed.DynamicLossScaler": deepspeed,
    "jmp.DynamicLossScale": jmp,
    "mpx.DynamicLossScaling": with_arguments(presets.mpx_dynamic),
    "flax.training.dynamic_scale.DynamicScale": with_arguments(
        presets.flax_dynamic_scale
    ),
    "keras.optimizers.LossScaleOptimizer": keras,
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": with_arguments(
        presets.megatron
    ),
    "mindspore.amp.DynamicLossScaleManager": with_arguments(presets.mindspore_dynamic),
    "mindspore.nn.DynamicLossScaleUpdateCell": with_arguments(
        presets.mindspore_dynamic, loss_scale_value="init_loss_scale"
    ),
    "mindspore.amp.DynamicLossScaler": with_arguments(
        presets.mindspore_dynamic, scale_value="init_loss_scale"
    ),
    "tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager": with_arguments(
        presets.tf_contrib_exponential_update
    ),
    "open_seq2seq.BackoffScaler": with_arguments(presets.openseq2seq_backoff),
    "tf.compat.v1.mixed_precision.DynamicLossScale": with_arguments(
        presets.tf_dynamic_loss_scale
    ),
    "tf_keras.mixed_precision.LossScaleOptimizer": with_arguments(
        presets.tf_keras_loss_scale
    ),
    "torch.amp.GradScaler": with_arguments(presets.torch_grad_scaler),
}


# Where recorded scales leave the range in which a scale and its reciprocal are normal
# float32 numbers. At 0 (it has no floor) the peer divides 0 by 0, and every gradient is
# NaN; above 2**126 (it has no ceiling, or the largest float32) the reciprocal is
# subnormal, which XLA flushes to zero, and gradients with it; at infinity (it stores a
# growth that is not finite) every later step overflows. Our rules stop at 2**-126 and
# 2**126.
UNSOUND = {
    "amp_C.update_scale_hysteresis (Apex kernel)": {"0", "above"},
    "apex.fp16_utils.loss_scaler.DynamicLossScaler": {"above"},
    "deepspeed.DynamicLossScaler": {"above", "inf"},
    "flax.training.dynamic_scale.DynamicScale": {"0", "above"},
    "keras.optimizers.LossScaleOptimizer": {"inf"},
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": {"inf"},
    "mindspore.amp.DynamicLossScaleManager": {"above", "inf"},
    "mindspore.amp.DynamicLossScaler": {"above"},
    "mindspore.nn.DynamicLossScaleUpdateCell": {"inf"},
    "tf.compat.v1.mixed_precision.DynamicLossScale": {"above"},
    "tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager": {"above"},
    "tf_keras.mixed_precision.LossScaleOptimizer": {"above"},
    "torch.amp.GradScaler": {"above"},
}


def sound_steps(case):
    """How many steps pass before the peer leaves the range in which it is sound."""
    scale = np.array(case["scale"], np.float64)
    sound = (scale >= SMALLEST) & (scale <= LARGEST)
    return len(scale) if sound.all() else int(np.argmin(sound))


def assert_scales(actual, expected, hyperparameters):
    numbers = [x for x in hyperparameters.values() if isinstance(x, float)]
    exact = all(math.frexp(x)[0] == 0.5 for x in numbers)
    if exact:
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_all_that_was_recorded_has_a_preset():
    assert len(TRACES) == 422
    assert {case["system"] for case in TRACES} == PRESETS.keys()


def test_where_the_peers_are_unsound_is_as_said():
    found = {}
    for case in TRACES:
        scale = np.array(case["scale"], np.float64)
        if sound_steps(case) < len(scale):
            ends = {0.0: "0", np.inf: "inf"}
            end = scale.min() if scale.min() < SMALLEST else scale.max()
            found.setdefault(case["system"], set()).add(ends.get(end, "above"))
    assert found == UNSOUND


@pytest.mark.parametrize("case", TRACES, ids=lambda case: case["id"])
def test_the_scale_takes_the_recorded_course(case):
    if case["scale_before_first_step"] > LARGEST:
        # Python floats; in float32, where gradients are divided, such a scale is inf.
        with pytest.raises(ValueError, match="` must be a number from 2"):
            PRESETS[case["system"]](case)
        return
    rule = PRESETS[case["system"]](case)
    flags = np.array([flag == "1" for flag in case["finite"]])
    first = np.float32(case["scale_before_first_step"])
    assert float(rule.init().loss_scale) == first
    states = run_rule(rule, flags)

    steps = sound_steps(case)
    assert_scales(
        states.loss_scale[:steps], case["scale"][:steps], case["hyperparameters"]
    )
    if "growth_count" in case:
        count = np.array(case["growth_count"][:steps])
        np.testing.assert_array_equal(states.growth_tracker[:steps], count)
    if "hysteresis_count" in case:
        # Once it is used up, to the same effect, most peers count on below zero, ours
        # stays at 0, and DeepSpeed's at 1.
        used_up = 1 if case["system"].startswith("deepspeed") else 0
        np.testing.assert_array_equal(
            np.maximum(states.hysteresis_tracker[:steps], used_up),
            np.maximum(case["hysteresis_count"][:steps], used_up),
        )
    if "applied" in case:
        applied = np.array([flag == "1" for flag in case["applied"]])
        np.testing.assert_array_equal(states.grads_finite[:steps], applied[:steps])


OPTIMIZERS = {
    "SGD": lambda lr, momentum: optax.sgd(lr, momentum=momentum),
    "Adam": lambda lr: optax.adam(lr),
}


@pytest.mark.parametrize("case", TRAININGS, ids=lambda case: case["id"])
def test_a_training_takes_the_course_of_torch(case):
    """Fed with torch's scaled gradients, optimizer and scale do what torch's did."""
    steps = case["steps"]
    inner = OPTIMIZERS[case["optimizer"]](**case["optimizer_arguments"])
    if case["clip_global_norm"] is not None:
        inner = optax.chain(optax.clip_by_global_norm(case["clip_global_norm"]), inner)
    rule = presets.torch_grad_scaler(**case["scaler_arguments"])
    tx = ls.with_loss_scaling(inner, rule)
    params = jnp.array(case["initial_params"], jnp.float32)

    def step(carry, scaled_grads):
        params, opt_state = carry
        grads = ls.unscale_grads(scaled_grads, opt_state)
        scale_used = ls.get_loss_scale(opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state = opt_state.scale_state
        return (params, opt_state), (params, grads, scale_used, state)

    scaled_grads = jnp.array(np.array(steps["scaled_grads"], np.float32))
    (_, opt_state), (params, grads, scale_used, states) = jax.lax.scan(
        step, (params, tx.init(params)), scaled_grads
    )

    assert "0" in steps["applied"], "meta-test: some steps are skipped"
    np.testing.assert_array_equal(scale_used, steps["scale_used"])
    np.testing.assert_array_equal(states.loss_scale, steps["scale_after"])
    np.testing.assert_array_equal(states.growth_tracker, steps["growth_count_after"])
    applied = [flag == "1" for flag in steps["applied"]]
    np.testing.assert_array_equal(states.grads_finite, applied)
    unscaled = np.array(steps["unscaled_grads"], np.float32)
    np.testing.assert_allclose(grads, unscaled, rtol=1e-6)
    # optax corrects Adam's bias in float32, torch in float64.
    tolerance = {"rtol": 1e-5} if case["optimizer"] == "SGD" else {"atol": 2e-5}
    np.testing.assert_allclose(params, steps["params"], **tolerance)
    if case["optimizer"] == "Adam":
        count = optax.tree.get(opt_state, "count")
        assert int(count) == steps["optimizer_step_count"][-1] == sum(applied)
