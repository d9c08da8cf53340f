"""States of other systems, as their packages saved them: ours goes on like theirs."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from shared import DATA
from training import run_rule

from optax_lossscale import presets

PRESETS = {
    "torch": presets.torch_grad_scaler,
    "jmp": presets.jmp_dynamic,
    "flax": presets.flax_dynamic_scale,
    "megatron": presets.megatron,
    "keras": presets.keras_loss_scale,
}
# What they save, by the names of our state. The rest of what jmp saves are arguments.
SCALES = ("scale", "loss_scale", "3")
COUNTERS = ("growth_tracker", "_growth_tracker", "counter", "fin_steps", "2")
FIELDS = {"loss_scale": SCALES, "growth_tracker": COUNTERS}
FIELDS["hysteresis_tracker"] = ("hysteresis_tracker",)
CASES = json.loads((DATA / "saved_states.json").read_text())["cases"]


def array(value):
    """What was saved, where that was an array."""
    return jnp.array(value["array"], value["dtype"]) if type(value) is dict else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["system"])
def test_saved_run_goes_on_as_recorded(case):
    """From the first state of its preset, with the saved scale and counters in it."""
    system = case["system"].partition(".")[0]
    saved = {key: array(value) for key, value in case["saved"].items()}
    arguments = case["arguments"]
    if system == "jmp":
        arguments = {k: v for k, v in saved.items() if k != "counter"}
    rule = PRESETS[system](**arguments)
    state = rule.init()
    for ours, names in FIELDS.items():
        for theirs in saved.keys() & names:
            number = jnp.asarray(saved[theirs], getattr(state, ours).dtype)
            state = state._replace(**{ours: number.reshape(())})
    states = run_rule(rule, [flag == "1" for flag in case["then"]], state=state)
    np.testing.assert_allclose(states.loss_scale, case["scale"], rtol=1e-6)
