"""Mixed precision (fp16) training for JAX and Optax, with a guard against NaN.

A train step changes in three places::

    import optax_lossscale as ls

    tx = ls.with_loss_scaling(optax.adamw(3e-4))                              # 1
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        grad_fn = ls.value_and_grad(ls.autocast(loss_fn, jnp.float16), opt_state)  # 2
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # 3
        return optax.apply_updates(params, updates), opt_state, loss

`autocast` computes the matmuls of a float32 loss in float16; leave it out if
you cast by hand. `value_and_grad` multiplies the loss by a scale before the backward
pass and divides the gradients by it afterward. `with_loss_scaling` skips a step whose
gradients are NaN or inf, and changes the scale by a rule. With ``value=loss``, a NaN or
inf loss skips the step and leaves the scale alone. Gradients that overflow also lower
the scale.

bfloat16 and float32 need no scale. Use `skip_nonfinite` as a guard against NaN::

    tx = ls.skip_nonfinite(optax.adamw(3e-4))
    loss, grads = jax.value_and_grad(ls.autocast(loss_fn, jnp.bfloat16))(params, batch)

For several losses with one optimizer, pass its state to each `value_and_grad`, and add
up the gradients. To accumulate gradients in a ``scan``, call `value_and_grad` in its
body with the state from before the loop, and call ``update`` once after the loop. Save
all of ``opt_state`` in a checkpoint, and restore it with ``tx.init(params)`` as the
target. `WithLossScalingState` shows how to add loss scaling to an existing run. Under
``pmap`` and ``shard_map``, pass ``axis_name``. If you forget it, ``shard_map`` raises
an error, but under ``pmap`` and ``shard_map(check_vma=False)`` the weights of the
devices diverge silently.

- Rules, which compute the next scale after each step: `DynamicLossScale` (the default),
  `FixedLossScale`, `HeadroomLossScale`, the rules of other systems in `presets`, and
  your own, derived from `LossScale`.
- For float16 parameters: `with_master_weights`.
- To read the state: `get_loss_scale`, `get_loss_scale_state`, `was_applied`,
  `LossScaleState`.
- To differentiate with ``jax.grad`` yourself: `scale_loss`, `unscale_grads`.
- For a trainer that differentiates your loss: `scale_backward`.
- For a scale per block of a network: `scale_block`.
- To retry a step at a lower scale instead of skipping it:
  `value_and_grad_with_retries`.
- To protect other state in a skipped step, such as BatchNorm statistics:
  `keep_if_applied`, `all_finite`, `select`.
- To find out what went wrong: `nonfinite_report`, `autocast_report`,
  `gradient_report`, `format_report`, `suggest_loss_scale`, `check_loss_scale`, and
  figures in `plots`.
"""

from . import plots, presets
from ._diagnostics.gradient_report import gradient_report
from ._diagnostics.guard import LossScaleError, check_loss_scale
from ._diagnostics.suggestion import SuggestedLossScale, suggest_loss_scale
from ._diagnostics.table import GradientReport, format_report
from ._find import get_loss_scale, get_loss_scale_state
from ._finite import all_finite, max_magnitude
from ._gradients.scaling import scale_loss, unscale_grads
from ._gradients.value_and_grad import grad, value_and_grad
from ._jax_internals import unavailable as _unavailable
from ._public import set_module as _set_module
from ._rules.base import LossScale
from ._rules.dynamic import DynamicLossScale
from ._rules.fixed import FixedLossScale
from ._rules.headroom import HeadroomLossScale, HeadroomState
from ._state import LossScaleState, MasterWeightsState, WithLossScalingState
from ._transform.keep_if_applied import keep_if_applied, was_applied
from ._transform.master_weights import with_master_weights
from ._transform.skip_nonfinite import skip_nonfinite
from ._transform.with_loss_scaling import with_loss_scaling
from ._tree import select

try:  # These rewrite programs, which a new jax may make in another way.
    from ._autocast.autocast import autocast
    from ._gradients.backward import scale_backward, scale_block
    from ._gradients.retries import value_and_grad_with_retries
    from ._reports.autocast_report import AutocastReport, autocast_report
    from ._reports.nonfinite_report import NonfiniteReport, nonfinite_report
except Exception as _error:
    AutocastReport = NonfiniteReport = _unavailable(_error)  # type: ignore[misc]
    autocast = autocast_report = scale_backward = _unavailable(_error)
    nonfinite_report = _unavailable(_error)
    scale_block = value_and_grad_with_retries = _unavailable(_error)

__version__ = "0.1.0"

__all__ = [
    "AutocastReport",
    "DynamicLossScale",
    "FixedLossScale",
    "GradientReport",
    "HeadroomLossScale",
    "HeadroomState",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "MasterWeightsState",
    "NonfiniteReport",
    "SuggestedLossScale",
    "WithLossScalingState",
    "all_finite",
    "autocast",
    "autocast_report",
    "check_loss_scale",
    "format_report",
    "get_loss_scale",
    "get_loss_scale_state",
    "grad",
    "gradient_report",
    "keep_if_applied",
    "max_magnitude",
    "nonfinite_report",
    "plots",
    "presets",
    "scale_backward",
    "scale_block",
    "scale_loss",
    "select",
    "skip_nonfinite",
    "suggest_loss_scale",
    "unscale_grads",
    "value_and_grad",
    "value_and_grad_with_retries",
    "was_applied",
    "with_loss_scaling",
    "with_master_weights",
]

_set_module(__name__, __all__)
