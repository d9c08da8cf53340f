"""Suggest a loss scale for given gradients."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._dtypes import limits_of
from .._rules.fields import check_field
from .._rules.headroom import HeadroomLossScale
from .._validation import check_order, is_traced
from .counting import add_up, measure
from .gradient_report import check_gradients


class SuggestedLossScale(NamedTuple):
    """The result of `suggest_loss_scale`, as arrays of shape ``()``.

    Attributes:
        loss_scale: float32, a power of two or one of the bounds.
        rescued: float32, the share of the finite nonzero elements that underflow
            without a scale, but not with this one.
        lost: float32, the share that underflows even with this scale.
        informative: bool, whether any element is finite and not zero. If none is,
            ``loss_scale`` is 2**15, or the nearest value within the bounds.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.SuggestedLossScale._fields
        ('loss_scale', 'rescued', 'lost', 'informative')
    """

    loss_scale: jax.Array
    rescued: jax.Array
    lost: jax.Array
    informative: jax.Array

    def __repr__(self) -> str:
        texts = {name: str(x) for name, x in self._asdict().items()}
        if not is_traced(self.loss_scale) and jnp.shape(self.loss_scale) == ():
            mantissa, exponent = math.frexp(jax.device_get(self.loss_scale))
            if mantissa == 0.5:
                texts["loss_scale"] = f"2**{exponent - 1}"
        return "\n".join(f"{name:11}  {text}" for name, text in texts.items())


def suggest_loss_scale(
    grads: Any,
    *,
    dtype: Any = jnp.float16,
    headroom: float = 3.0,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
) -> SuggestedLossScale:
    """Suggest the power of two that brings the largest gradient safely below overflow.

    Use the suggested loss scale for `FixedLossScale`, or as the first scale of another
    rule. `suggest_loss_scale` can be jitted, and does not wait for the device.

    Args:
        grads: unscaled gradients, computed in float32, of a few typical batches from
            early and late in training, as a list of pytrees.
        dtype: the floating-point dtype, or its name, in which training computes
            gradients.
        headroom: how many powers of two to leave free between the largest gradient and
            the largest value of ``dtype``, from 0 to 126.
        min_scale: the smallest scale to suggest, from 2**-126.
        max_scale: the largest scale to suggest, up to 2**126. Use powers of two.

    Returns:
        A `SuggestedLossScale`. If its ``informative`` is False, pass other gradients.

    Raises:
        ValueError: as `gradient_report`, or if a number is out of range or traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> early, late = jnp.array([0.0, 2e-5, 2e-2]), jnp.array([1e-9, 2e-6, 2e-3])
        >>> suggested = ls.suggest_loss_scale([early, late])
        >>> print(f"rescues {suggested.rescued:.0%}")
        rescues 20%
        >>> suggested
        loss_scale   2**18
        rescued      0.2
        lost         0.0
        informative  True

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor"
    """
    headroom = check_field("headroom", headroom)
    min_scale = check_field("min_scale", min_scale)
    max_scale = check_field("max_scale", max_scale)
    check_order(min_scale=min_scale, max_scale=max_scale)
    first = min(max(HeadroomLossScale.init_scale, min_scale), max_scale)
    rule = HeadroomLossScale(
        first, headroom=headroom, dtype=dtype, min_scale=min_scale, max_scale=max_scale
    )
    limits = limits_of(rule.dtype)
    check_gradients(grads)
    before = add_up(measure(grads, 1.0, limits))
    kinds = ("underflow", "subnormal", "normal", "overflow")
    elements = sum(before[kind] for kind in kinds)
    informative = elements > 0
    # The rule ignores a magnitude of 0, and keeps its first scale.
    magnitude = jnp.where(informative, before["max_abs"], 0)
    loss_scale = rule.update(rule.init(), True, magnitude).loss_scale
    lost = add_up(measure(grads, loss_scale, limits))["underflow"]
    elements = jnp.maximum(elements, 1)
    # A scale below 1 loses more elements than no scale.
    rescued = jnp.maximum(before["underflow"] - lost, 0) / elements
    return SuggestedLossScale(loss_scale, rescued, lost / elements, informative)
