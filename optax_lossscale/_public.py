"""Set the ``__module__`` of public names to the module that exports them."""

import inspect
import sys
from collections.abc import Iterable
from typing import NoReturn

# What other systems call it, and the names of ours.
ELSEWHERE = {
    "DynamicGradScaler": "presets.megatron",
    "DynamicLossScaleManager": "presets.mindspore_dynamic",
    "DynamicLossScaleUpdateCell": "presets.mindspore_dynamic",
    "DynamicLossScaler": "presets.deepspeed presets.fairseq presets.mindspore_dynamic",
    "DynamicLossScaling": "presets.mpx_dynamic",
    "DynamicScale": "presets.flax_dynamic_scale",
    "ExponentialUpdateLossScaleManager": "presets.tf_contrib_exponential_update",
    "FixedLossScaleManager": "presets.mindspore_fixed presets.tf_contrib_fixed",
    "FixedLossScaleUpdateCell": "presets.mindspore_fixed",
    "GradScaler": "presets.torch_grad_scaler",
    "LossScaleManager": "LossScale",
    "LossScaleOptimizer": "presets.keras_loss_scale presets.tf_keras_loss_scale",
    "MixedPrecisionLossScaleOptimizer": "with_loss_scaling",
    "NoOpLossScale": "FixedLossScale(1.0)",
    "StaticLossScale": "presets.jmp_static",
    "StaticLossScaler": "FixedLossScale",
    "TrainOneStepWithLossScaleCell": "with_loss_scaling",
}


def set_home(module_name: str, names: Iterable[str]) -> None:
    """Make errors, pickles, ``help`` and doctests show the module that users import."""
    module = sys.modules[module_name]
    for name in names:
        member = getattr(module, name)
        methods = vars(member).values() if inspect.isclass(member) else ()
        for x in (member, *(getattr(x, "__func__", x) for x in methods)):
            if inspect.isclass(x) or inspect.isfunction(x):
                x.__module__ = module_name


def lead_to_ours(module_name: str) -> None:
    """Let other systems' names raise an error that names ours.

    It is set here, because type checkers take any name for that of a member in a module
    that defines ``__getattr__``.
    """

    def missing(name: str) -> NoReturn:
        message = f"module {module_name!r} has no attribute {name!r}"
        if name not in ELSEWHERE:
            raise AttributeError(message)
        ours = " or ".join(f"`ls.{x}`" for x in ELSEWHERE[name].split())
        # With a name and no object, Python suggests nothing itself.
        raise AttributeError(f"{message}. Use {ours}.", name=name)

    setattr(sys.modules[module_name], "__getattr__", missing)  # noqa: B010
