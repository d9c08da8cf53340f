"""The rules of other systems, by their names and with their arguments.

Each function takes the arguments of the system that it is named after, with its
defaults, and returns the rule that takes the same course: in the tests, trajectories
recorded from the systems themselves. Where a system is broken its rule is not, which is
said under "Departures".

Examples:
    >>> import optax
    >>> import optax_lossscale as ls
    >>> rule = ls.presets.torch_grad_scaler(growth_interval=500)
    >>> tx = ls.with_loss_scaling(optax.adamw(3e-4), rule)
"""

from .._tolerant import TolerantLossScale
from .._verbatim import VerbatimLossScale
from ._fairseq import fairseq, metaseq
from ._jax import flax_dynamic_scale, jmp_dynamic, jmp_static, mpx_dynamic
from ._keras import keras_loss_scale, tf_keras_loss_scale
from ._large_models import deepspeed, deepspeed_fp16, megatron
from ._mindspore import mindspore_dynamic, mindspore_fixed
from ._openseq2seq import openseq2seq_backoff, openseq2seq_logmax
from ._pytorch import apex_amp, torch_grad_scaler
from ._tensorflow import (
    tf_contrib_exponential_update,
    tf_contrib_fixed,
    tf_dynamic_loss_scale,
    tf_fixed_loss_scale,
)

__all__ = [
    "TolerantLossScale",
    "VerbatimLossScale",
    "apex_amp",
    "deepspeed",
    "deepspeed_fp16",
    "fairseq",
    "flax_dynamic_scale",
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
    "torch_grad_scaler",
]
