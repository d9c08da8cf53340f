"""Suggest a loss scale for given gradients."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._rules.headroom import HeadroomLossScale
from .._validation import check, check_limits, check_order
from .counting import as_float32, measure
from .report import check_gradients, measurable


class SuggestedLossScale(NamedTuple):
    """The result of `suggest_loss_scale`, as arrays of shape ``()``.

    Attributes:
        loss_scale: float32, a power of two from ``min_scale`` to ``max_scale``, if
            there is one.
        rescued: float32, the share of the finite nonzero elements that underflow
            without a scale, but not with this one.
        lost: float32, the share of the finite nonzero elements that underflow even
            with this scale.
        informative: bool, whether any element is finite and not zero. If False,
            ``loss_scale`` is the rules' default, 2**15, or the nearest number within
            the bounds, and both shares are 0.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.SuggestedLossScale._fields
        ('loss_scale', 'rescued', 'lost', 'informative')
    """

    loss_scale: jax.Array
    rescued: jax.Array
    lost: jax.Array
    informative: jax.Array


def suggest_loss_scale(
    grads: Any,
    *,
    dtype: Any = jnp.float16,
    headroom: float = 3.0,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> SuggestedLossScale:
    """Suggest the power of two that brings the largest gradient safely below overflow.

    Use it to choose the scale of `FixedLossScale`, or the first scale of another rule.
    With the default bounds, every rule accepts the suggested scale. It is the scale
    that `HeadroomLossScale` would choose after seeing only these gradients.

    Pass the gradients of a few typical batches from early and late in training, as a
    list of trees. Compute them in float32, or at a scale that loses little: an element
    that is already zero tells nothing. Gradients inside the network may be larger than
    those of the parameters, and the headroom leaves room for them.

    It can be jitted, and returns arrays on the device without waiting for it.

    Args:
        grads: true (unscaled) gradients, any pytree of arrays, as for
            `gradient_report`. Non-finite elements are ignored.
        dtype: the floating-point type in which gradients are computed, or its name.
        headroom: how many octaves (factors of two) to leave free between the largest
            gradient and the type's maximum, from 0 to 126.
        min_scale: the smallest scale to suggest, from 2**-126, even if it leaves less
            headroom. `FixedLossScale` accepts no scale below 1.
        max_scale: the largest scale to suggest, up to 2**126. If there is no power of
            two between the bounds, one of the bounds is suggested.

    Returns:
        A `SuggestedLossScale`. If its ``informative`` is False, pass other gradients.

    Raises:
        ValueError: if ``grads`` is a single number, holds something other than arrays,
            or holds no floating-point array; if ``dtype`` is not a floating-point type;
            if ``headroom`` or a bound is out of range; if ``min_scale`` exceeds
            ``max_scale``; or if a bound is traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> early = {"w": jnp.array([1e-9, 2e-5, 2e-2])}
        >>> suggested = ls.suggest_loss_scale(early)
        >>> print(f"{suggested.loss_scale:.0f}, rescues {suggested.rescued:.0%}")
        262144, rescues 33%
        >>> rule = ls.DynamicLossScale(init_scale=suggested.loss_scale)

        Pass several batches as a list:

        >>> late = {"w": jnp.array([0.0, 2e-6, 2e-3])}
        >>> suggested = ls.suggest_loss_scale([early, late])
        >>> print(f"{suggested.loss_scale:.0f}, rescues {suggested.rescued:.0%}")
        262144, rescues 20%

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor": the scale times the largest gradient should stay
        below 65,504
    """
    least, largest = _powers_of_two(min_scale, max_scale)
    usual = HeadroomLossScale.init_scale
    rule = HeadroomLossScale(
        init_scale=min(max(usual, least), largest),
        headroom=headroom,
        dtype=dtype,
        min_scale=least,
        max_scale=largest,
    )
    limits = check_limits(dtype)
    check_gradients("grads", grads)
    leaves = measurable(jax.tree.leaves(grads)) or [None]
    before, max_abs = measure(leaves, jnp.ones((), jnp.float32), limits)
    informative, magnitude = _evidence(before, max_abs)
    loss_scale = rule.update(rule.init(), True, magnitude).loss_scale
    after, _ = measure(leaves, loss_scale, limits)
    rescued, lost = _shares(before, after)
    return SuggestedLossScale(loss_scale, rescued, lost, informative)


def _powers_of_two(min_scale: float, max_scale: float) -> tuple[float, float]:
    """Return the outermost powers of two in the bounds, or the bounds if none is."""
    min_scale = check("min_scale", min_scale)
    max_scale = check("max_scale", max_scale)
    check_order(min_scale=min_scale, max_scale=max_scale)
    # frexp returns a mantissa from 0.5 to 1.
    mantissa, exponent = math.frexp(min_scale)
    least = 2.0 ** (exponent - (mantissa == 0.5))
    largest = 2.0 ** (math.frexp(max_scale)[1] - 1)
    return (least, largest) if least <= largest else (min_scale, max_scale)


@jax.jit
def _evidence(counts: jax.Array, max_abs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return whether any element is finite and nonzero, and the largest magnitude."""
    elements, _ = _elements_and_underflow(counts)
    informative = as_float32(elements) > 0
    return informative, jnp.where(informative, jnp.max(max_abs), 0)


@jax.jit
def _shares(before: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rescued and the lost share, from counts without and with the scale.

    A scale below 1 loses more than no scale, and rescues nothing.
    """
    elements, lost_before = _elements_and_underflow(before)
    _, lost = _elements_and_underflow(after)
    number = jnp.maximum(as_float32(elements), 1)
    rescued = jnp.maximum(as_float32(lost_before - lost), 0)
    return rescued / number, as_float32(lost) / number


def _elements_and_underflow(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how many elements are finite and nonzero, and how many underflow."""
    sums = jnp.sum(counts, axis=-1, dtype=jnp.int32)
    nan, inf, zero, underflow, _, _, size = jnp.moveaxis(sums, 1, 0)
    return size - nan - inf - zero, underflow
