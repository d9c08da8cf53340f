"""The loss-scaling rules of other systems, and conversion of their saved states.

A preset takes the arguments of the system that it is named after, with the same
defaults, and returns a rule that changes the scale in the same way. The tests replay
trajectories recorded from the systems themselves. If a system has a defect that breaks
training, the preset does not reproduce it: the book has a table of all `departures`.

- The rule is a `DynamicLossScale` if that changes the scale in the same way. Otherwise
  it is a `VerbatimLossScale`, for example if the first scale is below the smallest one.
- An argument that is out of range raises ValueError.

``from_..._state_dict`` and ``to_..._state_dict`` convert saved states, so that a run
can continue in the other system.

Examples:
    >>> import optax
    >>> import optax_lossscale as ls
    >>> rule = ls.presets.torch_grad_scaler(growth_interval=500)
    >>> tx = ls.with_loss_scaling(optax.adamw(3e-4), rule)
"""

from .._public import set_home as _set_home
from .._rules.verbatim import VerbatimLossScale
from ._apex import apex_amp
from ._deepspeed import deepspeed, deepspeed_fp16
from ._fairseq import fairseq, metaseq
from ._flax import flax_dynamic_scale, from_flax_state_dict, to_flax_state_dict
from ._jmp import from_jmp_state_dict, jmp_dynamic, jmp_static, to_jmp_state_dict
from ._keras import (
    from_keras_state_dict,
    keras_loss_scale,
    tf_keras_loss_scale,
    to_keras_state_dict,
)
from ._megatron import from_megatron_state_dict, megatron, to_megatron_state_dict
from ._mindspore import mindspore_dynamic, mindspore_fixed
from ._mpx import mpx_dynamic
from ._openseq2seq import openseq2seq_backoff, openseq2seq_logmax
from ._tensorflow import (
    tf_contrib_exponential_update,
    tf_contrib_fixed,
    tf_dynamic_loss_scale,
    tf_fixed_loss_scale,
)
from ._torch import from_torch_state_dict, to_torch_state_dict, torch_grad_scaler

__all__ = [
    "VerbatimLossScale",
    "apex_amp",
    "deepspeed",
    "deepspeed_fp16",
    "fairseq",
    "flax_dynamic_scale",
    "from_flax_state_dict",
    "from_jmp_state_dict",
    "from_keras_state_dict",
    "from_megatron_state_dict",
    "from_torch_state_dict",
    "jmp_dynamic",
    "jmp_static",
    "keras_loss_scale",
    "megatron",
    "metaseq",
    "mindspore_dynamic",
    "mindspore_fixed",
    "mpx_dynamic",
    "openseq2seq_backoff",
    "openseq2seq_logmax",
    "tf_contrib_exponential_update",
    "tf_contrib_fixed",
    "tf_dynamic_loss_scale",
    "tf_fixed_loss_scale",
    "tf_keras_loss_scale",
    "to_flax_state_dict",
    "to_jmp_state_dict",
    "to_keras_state_dict",
    "to_megatron_state_dict",
    "to_torch_state_dict",
    "torch_grad_scaler",
]

_set_home(__name__, __all__)
