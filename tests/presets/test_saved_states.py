"""States of other systems, as their packages saved them: ours goes on like theirs."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from shared import DATA
from training import run_rule

from optax_lossscale import presets

# Of the recorded cases, what each system saves, by the names of our state and of its
# preset. Flax, Megatron-LM and Keras save no arguments.
FIELDS = {
    "torch.amp.GradScaler": (
        presets.torch_grad_scaler,
        {"scale": "loss_scale", "_growth_tracker": "growth_tracker"},
    ),
    "jmp.DynamicLossScale": (
        presets.jmp_dynamic,
        {"loss_scale": "loss_scale", "counter": "growth_tracker"},
    ),
    "flax.training.dynamic_scale.DynamicScale": (
        presets.flax_dynamic_scale,
        {"scale": "loss_scale", "fin_steps": "growth_tracker"},
    ),
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": (
        presets.megatron,
        {
            "scale": "loss_scale",
            "growth_tracker": "growth_tracker",
            "hysteresis_tracker": "hysteresis_tracker",
        },
    ),
    "keras.optimizers.LossScaleOptimizer": (
        presets.keras_loss_scale,
        {"3": "loss_scale", "2": "growth_tracker"},
    ),
}
CASES = json.loads((DATA / "saved_states.json").read_text())["cases"]


def array(value):
    """What was saved, where that was an array."""
    return jnp.array(value["array"], value["dtype"]) if type(value) is dict else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["system"])
def test_a_saved_run_goes_on_as_recorded(case):
    """From the first state of its preset, with the saved scale and counters in it."""
    preset, fields = FIELDS[case["system"]]
    saved = {key: array(value) for key, value in case["saved"].items()}
    arguments = dict(case["arguments"])
    if "jmp" in case["system"]:
        arguments = {k: v for k, v in saved.items() if k != "counter"}
    rule = preset(**arguments)
    held = {ours: saved[key] for key, ours in fields.items() if key in saved}
    state = rule.init()
    state = state._replace(
        **{
            k: jnp.asarray(x, getattr(state, k).dtype).reshape(())
            for k, x in held.items()
        }
    )
    states = run_rule(rule, [flag == "1" for flag in case["then"]], state=state)
    np.testing.assert_allclose(states.loss_scale, case["scale"], rtol=1e-6)
