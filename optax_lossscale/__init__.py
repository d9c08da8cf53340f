"""Loss scaling for JAX and Optax: train in float16, and never apply a NaN."""

from ._dynamic import DynamicLossScale
from ._grad import grad, scale_loss, unscale_grads, value_and_grad
from ._inspect import get_loss_scale, get_loss_scale_state
from ._loss_scale import FixedLossScale, LossScale
from ._state import LossScaleState
from ._transform import WithLossScalingState, with_loss_scaling
from ._tree import all_finite, select

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleState",
    "WithLossScalingState",
    "all_finite",
    "get_loss_scale",
    "get_loss_scale_state",
    "grad",
    "scale_loss",
    "select",
    "unscale_grads",
    "value_and_grad",
    "with_loss_scaling",
]
