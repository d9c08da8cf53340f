"""One of every rule, in every form that differs in more than numbers."""

import inspect
import re

import pytest
from shared import slow_but

import optax_lossscale as ls
from optax_lossscale import presets

PRESETS = {
    "apex_amp": presets.apex_amp(),
    "deepspeed": presets.deepspeed(),
    "deepspeed_fp16": presets.deepspeed_fp16(consecutive_hysteresis=True),
    "fairseq": presets.fairseq(),
    "flax_dynamic_scale": presets.flax_dynamic_scale(growth_interval=2),
    "jmp_dynamic": presets.jmp_dynamic(2.0**15, period=2),
    "keras_loss_scale": presets.keras_loss_scale(dynamic_growth_steps=1),
    "megatron": presets.megatron(growth_interval=3),
    "mindspore_dynamic": presets.mindspore_dynamic(scale_factor=3),
    "mpx_dynamic": presets.mpx_dynamic(2.0**15),
    "tf_contrib_exponential_update": presets.tf_contrib_exponential_update(1024, 2),
    "tf_dynamic_loss_scale": presets.tf_dynamic_loss_scale(),
    "tf_keras_loss_scale": presets.tf_keras_loss_scale(),
    "torch_grad_scaler": presets.torch_grad_scaler(growth_interval=2),
}
# The rules of the package with their defaults: "fixed", "headroom" and so on.
DEFAULTS = {
    re.sub(r"(?<=.)(?=[A-Z])", "-", name.removesuffix("LossScale")).lower(): rule()
    for name, rule in inspect.getmembers(ls, inspect.isclass)
    if issubclass(rule, ls.LossScale) and not inspect.isabstract(rule)
}
VARIANTS = {
    **DEFAULTS,
    "headroom of bfloat16": ls.HeadroomLossScale(dtype="bfloat16", headroom=0.5),
    "torch, disabled": presets.torch_grad_scaler(enabled=False),
    "apex, fixed": presets.apex_amp(128.0),
}
RULES = {**PRESETS, **VARIANTS}
# The others compile the same code with other numbers.
QUICK = ["dynamic", "megatron", "tf_contrib_exponential_update", "fixed", "headroom"]
QUICK += ["apex, fixed", "deepspeed"]
every_rule = pytest.mark.parametrize(
    "rule", slow_but([RULES[name] for name in QUICK], RULES.values()), ids=RULES
)
