"""One of every rule, in every form that differs in more than numbers."""

import inspect
import re

import pytest
from shared import slow_but

import optax_lossscale as ls
from optax_lossscale import presets

# The first scale, where it has no default.
FIRST = {
    "jmp_dynamic": {"loss_scale": 8.0},
    "mpx_dynamic": {"loss_scaling": 8.0},
    "tf_contrib_exponential_update": {"init_loss_scale": 8, "incr_every_n_steps": 100},
}
PRESETS = {x: getattr(presets, x)(**FIRST.get(x, {})) for x in presets.__all__}
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
QUICK = [*DEFAULTS, "megatron", "tf_contrib_exponential_update", "apex, fixed"]
QUICK += ["deepspeed"]
every_rule = pytest.mark.parametrize(
    "rule", slow_but([RULES[name] for name in QUICK], RULES.values()), ids=RULES
)
