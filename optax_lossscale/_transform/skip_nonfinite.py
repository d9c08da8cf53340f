"""The guard against NaN for training without a loss scale."""

import optax

from .._axes import AxisName
from .._rules.fixed import FixedLossScale
from .extra_args import check_inner
from .with_loss_scaling import LossScaling, with_loss_scaling


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName | None = None,
    check_updates: bool = False,
) -> LossScaling:
    """Skip steps whose gradients or loss are not finite, in bfloat16 and float32.

    Nothing is scaled, and ``jax.value_and_grad`` stays. A skipped step is counted, and
    leaves the parameters and the state of ``inner`` as they were, bit for bit. It is
    ``with_loss_scaling(inner, FixedLossScale(1.0))``, with the same state.

    Put it outermost. Gradients are always checked, the loss only as ``value=loss`` in
    ``update``: a label out of range gives a NaN loss and finite gradients. The
    optimizer does not see BatchNorm statistics and averages of the parameters: keep
    those with `keep_if_applied`. `check_loss_scale` raises if steps are skipped, with
    ``max_consecutive_skips=0`` at the first one.

    Args:
        inner: the optimizer, any Optax transformation.
        axis_name: as for `with_loss_scaling`.
        check_updates: whether to skip a step, too, if ``inner`` turns finite gradients
            into NaN or inf. By default they go into the parameters.

    Returns:
        The transformation, with the state and the ``update`` of `with_loss_scaling`.

    Raises:
        TypeError, ValueError: as `with_loss_scaling`.

    Warns:
        UserWarning: as `with_loss_scaling`, but not of losses that are not scaled.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> def loss_fn(params, x):
        ...     return jnp.sum(params * x)
        >>> params, bad_batch = jnp.array([1.0, 2.0]), jnp.array([0.1, jnp.nan])
        >>> tx = ls.skip_nonfinite(optax.adam(1e-3))
        >>> opt_state = tx.init(params)
        >>> loss, grads = jax.value_and_grad(loss_fn)(params, bad_batch)
        >>> updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        >>> print(optax.apply_updates(params, updates), ls.was_applied(opt_state))
        [1. 2.] False
    """
    check_inner(inner, "skip_nonfinite")
    return with_loss_scaling(
        inner, FixedLossScale(1.0), axis_name=axis_name, check_updates=check_updates
    )
