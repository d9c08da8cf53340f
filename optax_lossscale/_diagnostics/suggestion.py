"""Which loss scale gradients call for."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._rules.headroom import HeadroomLossScale
from .report import gradient_report


class SuggestedLossScale(NamedTuple):
    """What `suggest_loss_scale` returns.

    Attributes:
        loss_scale: float32 of shape ``()``, a power of two from 2**-126 to 2**126.
        rescued: float32 of shape ``()``, the share, from 0 to 1, of the elements that
            are finite and not zero which the type loses to zero without a scale, and
            not with this one.
        lost: float32 of shape ``()``, the share of them which it loses even so.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.SuggestedLossScale._fields
        ('loss_scale', 'rescued', 'lost')
    """

    loss_scale: jax.Array
    rescued: jax.Array
    lost: jax.Array


def suggest_loss_scale(
    grads: Any, *, dtype: Any = jnp.float16, headroom: float = 3.0
) -> SuggestedLossScale:
    """Return the power of two that brings the largest gradient safely below overflow.

    For `FixedLossScale`, or to begin with in another rule. It is the scale that
    `HeadroomLossScale` would take after seeing these gradients alone. It compiles, and
    returns arrays on the device without waiting for it.

    Give gradients of a few typical steps, early and late, computed in float32 or at a
    scale that loses little. Those of the parameters say nothing of larger ones inside
    of the network, for which the headroom is left.

    Args:
        grads: true (unscaled) gradients, any pytree of arrays, as for
            `gradient_report`. Elements that are not finite are passed over.
        dtype: the floating-point type that gradients are computed in, or its name.
        headroom: how many octaves (factors of two) to leave free between the largest
            gradient and the type's maximum, from 0 to 126.

    Returns:
        A `SuggestedLossScale`; of gradients that are all zero, a scale of 1.

    Raises:
        ValueError: if ``grads`` is a single number, holds something other than arrays,
            or nothing that is floating-point; if ``dtype`` is no floating-point type or
            ``headroom`` not in its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> suggested = ls.suggest_loss_scale({"w": jnp.array([1e-9, 2e-6, 1e-3])})
        >>> print(f"{suggested.loss_scale:.0f}, rescues {suggested.rescued:.0%}")
        4194304, rescues 33%
        >>> rule = ls.DynamicLossScale(init_scale=suggested.loss_scale)

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor": the product of the scale and the largest gradient
        is to stay below 65,504.
    """
    rule = HeadroomLossScale(
        init_scale=1.0,
        headroom=headroom,
        dtype=dtype,
        min_scale=SMALLEST_SCALE,
        max_scale=LARGEST_SCALE,
    )
    before = gradient_report(grads, dtype=dtype).totals
    loss_scale = rule.update(rule.init(), True, before.max_abs).loss_scale
    after = gradient_report(grads, dtype=dtype, loss_scale=loss_scale).totals

    elements = before.size - before.nan - before.inf - before.zero
    elements = jnp.maximum(elements, 1).astype(jnp.float32)
    lost = after.underflow / elements
    return SuggestedLossScale(loss_scale, before.underflow / elements - lost, lost)
