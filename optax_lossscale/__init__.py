"""Loss scaling for JAX and Optax: train in float16, and never apply a NaN."""

from . import presets
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
from ._guard import LossScaleError, check_loss_scale
from ._headroom import HeadroomLossScale
from ._inspect import get_loss_scale, get_loss_scale_state
from ._log_normal import LogNormalLossScale
from ._loss_scale import FixedLossScale, LossScale
from ._state import LossScaleState, LossScaleStateWithMemory
from ._transform import WithLossScalingState, with_loss_scaling
from ._tree import all_finite, max_magnitude, select

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "HeadroomLossScale",
    "LogNormalLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaleStateWithMemory",
    "WithLossScalingState",
    "all_finite",
    "check_loss_scale",
    "from_flax_state_dict",
    "from_jmp_state_dict",
    "from_keras_state_dict",
    "from_megatron_state_dict",
    "from_torch_state_dict",
    "get_loss_scale",
    "get_loss_scale_state",
    "grad",
    "max_magnitude",
    "presets",
    "scale_loss",
    "select",
    "to_flax_state_dict",
    "to_jmp_state_dict",
    "to_keras_state_dict",
    "to_megatron_state_dict",
    "to_torch_state_dict",
    "unscale_grads",
    "value_and_grad",
    "with_loss_scaling",
]
