"""The guard against NaN for training without a loss scale."""

import optax

from .._axes import AxisName
from .._rules.fixed import FixedLossScale
from .inner import check_inner
from .with_loss_scaling import LossScaling, with_loss_scaling


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName | None = None,
    check_updates: bool = False,
) -> LossScaling:
    """Wrap an optimizer to skip steps with NaN or inf, in bfloat16 and float32.

    A step is skipped if its gradients or its loss are not finite. Nothing is scaled:
    keep calling ``jax.value_and_grad``. A skipped step is counted, and leaves the
    parameters and the state of ``inner`` as they were, bit for bit. This is the same as
    ``with_loss_scaling(inner, FixedLossScale(1.0))``, and has the same state.

    Put `skip_nonfinite` outermost, around all other transformations. It always checks
    the gradients. It checks the loss if you pass ``value=loss`` to ``update``. Do so,
    because a label out of range gives a NaN loss with finite gradients. Protect
    BatchNorm statistics and averages of the parameters with `keep_if_applied`. To stop
    a run that skips steps, call `check_loss_scale`; with ``max_consecutive_skips=0``,
    it raises an error at the first skip.

    Args:
        inner: the optimizer, any Optax transformation.
        axis_name: as for `with_loss_scaling`.
        check_updates: whether to also skip a step if ``inner`` turns finite gradients
            into NaN or inf. By default, these reach the parameters.

    Returns:
        The transformation, with the state and the ``update`` of `with_loss_scaling`.

    Raises:
        TypeError, ValueError: as `with_loss_scaling`.

    Warns:
        UserWarning: as `with_loss_scaling`, without the warnings about scaling.

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
