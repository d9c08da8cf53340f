"""The loss-scaling rules of other systems.

A preset takes the arguments of the system that it is named after, with the same
defaults, and returns a rule that changes the scale in the same way. The tests replay
trajectories recorded from the systems themselves. If a system has a defect that breaks
training, the preset does not reproduce it: the book has a table of all `departures`.

- A preset returns a `DynamicLossScale` if that changes the scale in the same way.
  Otherwise it returns a `VerbatimLossScale`, for example if the first scale is below
  the smallest one. For a constant scale it returns a `FixedLossScale`.
- An argument that is out of range raises ValueError.

A run that began in another system goes on from its scale and its counters: see the
guides for those who come from another system.

Examples:
    >>> import optax
    >>> import optax_lossscale as ls
    >>> rule = ls.presets.torch_grad_scaler(growth_interval=500)
    >>> tx = ls.with_loss_scaling(optax.adamw(3e-4), rule)
"""

from .._public import set_module as _set_module
from .._rules.verbatim import VerbatimLossScale
from ._apex import apex_amp
from ._deepspeed import deepspeed, deepspeed_fp16
from ._fairseq import fairseq
from ._flax import flax_dynamic_scale
from ._jmp import jmp_dynamic
from ._keras import keras_loss_scale, tf_keras_loss_scale
from ._megatron import megatron
from ._mindspore import mindspore_dynamic
from ._mpx import mpx_dynamic
from ._tensorflow import (
    tf_contrib_exponential_update,
    tf_dynamic_loss_scale,
)
from ._torch import torch_grad_scaler

__all__ = [
    "VerbatimLossScale",
    "apex_amp",
    "deepspeed",
    "deepspeed_fp16",
    "fairseq",
    "flax_dynamic_scale",
    "jmp_dynamic",
    "keras_loss_scale",
    "megatron",
    "mindspore_dynamic",
    "mpx_dynamic",
    "tf_contrib_exponential_update",
    "tf_dynamic_loss_scale",
    "tf_keras_loss_scale",
    "torch_grad_scaler",
]

_set_module(__name__, __all__)
