"""Which loss scale gradients call for."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._precision import limits_of
from .._rules.arguments import check_max_scale, check_min_scale, check_order
from .._rules.headroom import HeadroomLossScale
from .._validation import check_concrete
from .counting import as_float32, measure
from .report import check_gradients, measurable


class SuggestedLossScale(NamedTuple):
    """What `suggest_loss_scale` returns, arrays of shape ``()``.

    Attributes:
        loss_scale: float32, a power of two from ``min_scale`` to ``max_scale``, if
            there is one.
        rescued: float32, the share of the finite elements other than zero that
            underflow without a scale, but not with this one.
        lost: float32, the share of them that underflow even with this one.
        informative: bool, whether any element is finite and not zero. If not, the
            gradients tell nothing: ``loss_scale`` is 2**15, with which the rules begin,
            or the nearest in the range, and the shares are 0.

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
    """Return the power of two that brings the largest gradient safely below overflow.

    For `FixedLossScale`, or for the first scale of another rule. Every rule takes it as
    it is: it lies in the range in which the rules keep theirs. `HeadroomLossScale`
    would take it after seeing these gradients alone. This compiles, and returns arrays
    on the device without waiting for it.

    Give gradients of a few typical batches, early and late, as a list of trees: they
    are taken together. Compute them in float32, or at a scale that loses little, since
    a zero says nothing. Gradients inside of the network may be larger than those of the
    parameters: the headroom is for them.

    Args:
        grads: true (unscaled) gradients, any pytree of arrays, as for
            `gradient_report`. Elements that are not finite are passed over.
        dtype: the floating-point type that gradients are computed in, or its name.
        headroom: how many octaves (factors of two) to leave free between the largest
            gradient and the type's maximum, from 0 to 126.
        min_scale: the least scale to suggest, from 2**-126, even where it leaves less
            headroom. `FixedLossScale` takes none below 1.
        max_scale: the largest scale to suggest, up to 2**126. Where no power of two
            lies between the bounds, one of them is suggested.

    Returns:
        A `SuggestedLossScale`. If its ``informative`` is False, try other gradients.

    Raises:
        ValueError: if ``grads`` is a single number, holds something other than arrays,
            or nothing that is floating-point; if ``dtype`` is no floating-point type,
            ``headroom`` or a bound is out of range, ``min_scale`` exceeds
            ``max_scale``, or a bound is being traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> early = {"w": jnp.array([1e-9, 2e-5, 2e-2])}
        >>> suggested = ls.suggest_loss_scale(early)
        >>> print(f"{suggested.loss_scale:.0f}, rescues {suggested.rescued:.0%}")
        262144, rescues 33%
        >>> rule = ls.DynamicLossScale(init_scale=suggested.loss_scale)

        Several batches are taken together:

        >>> late = {"w": jnp.array([0.0, 2e-6, 2e-3])}
        >>> suggested = ls.suggest_loss_scale([early, late])
        >>> print(f"{suggested.loss_scale:.0f}, rescues {suggested.rescued:.0%}")
        262144, rescues 20%

    References:
        NVIDIA, `Train With Mixed Precision
        <https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/>`_,
        "Choosing A Scaling Factor": the product of the scale and the largest gradient
        is to stay below 65,504.
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
    limits = limits_of(dtype)
    check_gradients("grads", grads)
    leaves = measurable(jax.tree.leaves(grads)) or [None]
    before, max_abs = measure(leaves, jnp.ones((), jnp.float32), limits)
    informative, magnitude = _evidence(before, max_abs)
    loss_scale = rule.update(rule.init(), True, magnitude).loss_scale
    after, _ = measure(leaves, loss_scale, limits)
    rescued, lost = _shares(before, after)
    return SuggestedLossScale(loss_scale, rescued, lost, informative)


def _powers_of_two(min_scale: float, max_scale: float) -> tuple[float, float]:
    """Return the outermost powers of two within the bounds, or these if none is."""
    advice = "Pass numbers: a suggestion is compiled for its bounds."
    check_concrete("min_scale", min_scale, advice)
    check_concrete("max_scale", max_scale, advice)
    min_scale, max_scale = check_min_scale(min_scale), check_max_scale(max_scale)
    check_order(min_scale=min_scale, max_scale=max_scale)
    # frexp counts from 0.5.
    mantissa, exponent = math.frexp(min_scale)
    least = 2.0 ** (exponent - (mantissa == 0.5))
    largest = 2.0 ** (math.frexp(max_scale)[1] - 1)
    return (least, largest) if least <= largest else (min_scale, max_scale)


@jax.jit
def _evidence(counts: jax.Array, max_abs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return whether any element is finite and not zero, and the largest of them."""
    elements, _ = _elements_and_underflow(counts)
    informative = as_float32(elements) > 0
    return informative, jnp.where(informative, jnp.max(max_abs), 0)


@jax.jit
def _shares(before: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the shares that a scale rescues and loses, by counts before and after it.

    A scale below 1 loses more than none does, and rescues nothing.
    """
    elements, lost_before = _elements_and_underflow(before)
    _, lost = _elements_and_underflow(after)
    number = jnp.maximum(as_float32(elements), 1)
    rescued = jnp.maximum(as_float32(lost_before - lost), 0)
    return rescued / number, as_float32(lost) / number


def _elements_and_underflow(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how many elements are finite and not zero, and how many underflow."""
    sums = jnp.sum(counts, axis=-1, dtype=jnp.int32)
    nan, inf, zero, underflow, _, _, size = jnp.moveaxis(sums, 1, 0)
    return size - nan - inf - zero, underflow
