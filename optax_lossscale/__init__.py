"""Loss scaling for JAX and Optax: train in float16, and never apply a NaN."""

from . import plots, presets
from ._convert._jax import (
    from_flax_state_dict,
    from_jmp_state_dict,
    to_flax_state_dict,
    to_jmp_state_dict,
)
from ._convert._keras import from_keras_state_dict, to_keras_state_dict
from ._convert._torch import (
    from_megatron_state_dict,
    from_torch_state_dict,
    to_megatron_state_dict,
    to_torch_state_dict,
)
from ._dynamic import DynamicLossScale
from ._grad import grad, scale_loss, unscale_grads, value_and_grad
from ._guard import LossScaleError, check_loss_scale, watch_loss_scale
from ._headroom import HeadroomLossScale
from ._inspect import get_loss_scale, get_loss_scale_state
from ._log_normal import LogNormalLossScale
from ._loss_scale import FixedLossScale, LossScale
from ._report import GradientReport, gradient_report
from ._state import LossScaleState, LossScaleStateWithMemory
from ._suggest import SuggestedLossScale, suggest_loss_scale
from ._table import format_report
from ._transform import WithLossScalingState, with_loss_scaling
from ._tree import all_finite, max_magnitude, select

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "GradientReport",
    "HeadroomLossScale",
    "LogNormalLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaleStateWithMemory",
    "SuggestedLossScale",
    "WithLossScalingState",
    "all_finite",
    "check_loss_scale",
    "format_report",
    "from_flax_state_dict",
    "from_jmp_state_dict",
    "from_keras_state_dict",
    "from_megatron_state_dict",
    "from_torch_state_dict",
    "get_loss_scale",
    "get_loss_scale_state",
    "grad",
    "gradient_report",
    "max_magnitude",
    "plots",
    "presets",
    "scale_loss",
    "select",
    "suggest_loss_scale",
    "to_flax_state_dict",
    "to_jmp_state_dict",
    "to_keras_state_dict",
    "to_megatron_state_dict",
    "to_torch_state_dict",
    "unscale_grads",
    "value_and_grad",
    "watch_loss_scale",
    "with_loss_scaling",
]
