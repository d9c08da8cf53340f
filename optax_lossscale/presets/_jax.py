"""jmp, Flax, mpx."""

from typing import Any

from .._loss_scale import SMALLEST_SCALE, FixedLossScale, LossScale
from .._validation import check_count
from .._verbatim import SCALE_DTYPES
from ._build import growing, named, reciprocal

_LARGEST_HALF = 65504.0


def jmp_static(loss_scale: float) -> LossScale:
    """Return the rule of ``jmp.StaticLossScale``.

    The scale stays. jmp leaves the skipping to the caller and recommends it, so
    non-finite steps are skipped; ``FixedLossScale(scale, skip_nonfinite=False)`` skips
    none. ``jmp.NoOpLossScale`` is ``FixedLossScale(1.0)``.

    Departures: gradients are divided in float32 or wider, where jmp divides float16 in
    float16 and flushes small ones to zero.

    Args:
        loss_scale: the scale, 1 or more.

    Returns:
        A `FixedLossScale`.

    Raises:
        ValueError: if the scale is below 1 or no number.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.jmp_static(2.0**15)
        FixedLossScale(loss_scale=32768.0, skip_nonfinite=True)

    References:
        `jmp <https://github.com/google-deepmind/jmp#loss-scaling>`_
    """
    return FixedLossScale(loss_scale)


def jmp_dynamic(
    loss_scale: Any,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> LossScale:
    """Return the rule of ``jmp.DynamicLossScale``.

    The scale is multiplied by ``factor`` at every ``period``-th finite step in a row,
    and divided by it, down to ``min_loss_scale``, at every other step. If
    ``loss_scale`` is a float16 or bfloat16 number the scale is rounded like one, and
    does not grow out of its range.

    Departures: the floor is kept under ``jit`` too, where jmp forgets it for 1. The
    ceiling is 2**126, where jmp's is the largest float32, of which the reciprocal is
    flushed to zero. Gradients are divided in float32 or wider.

    Args:
        loss_scale: the first scale, from 2**-126 to 2**126. One below the floor stays
            until an overflow raises it, as in jmp.
        period: finite steps in a row before a growth.
        factor: what a growth multiplies by and a backoff divides by, above 1.
        min_loss_scale: the least scale, 0 or more; in effect 2**-126 or more.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a narrow type, or a first
        scale below the floor.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_lossscale import presets
        >>> presets.jmp_dynamic(jnp.asarray(2.0**15), period=100).growth_interval
        100
        >>> presets.jmp_dynamic(jnp.float16(2.0**15)).scale_dtype
        'float16'

    References:
        `jmp <https://github.com/google-deepmind/jmp#loss-scaling>`_
    """
    dtype = str(getattr(loss_scale, "dtype", "float32"))
    narrow = dtype if dtype in SCALE_DTYPES else "float32"
    with named(
        init_scale="loss_scale",
        growth_factor="factor",
        growth_interval="period",
        min_scale="min_loss_scale",
    ):
        return growing(
            init_scale=loss_scale,
            growth_factor=factor,
            backoff_factor=reciprocal("factor", factor),
            growth_interval=period,
            min_scale=min_loss_scale,
            scale_dtype=narrow,
        )


def flax_dynamic_scale(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> LossScale:
    """Return the rule of ``flax.training.dynamic_scale.DynamicScale``.

    The scale is multiplied by ``growth_factor`` at every finite step that follows
    ``growth_interval`` others in a row, one later than Flax documents, and by
    ``backoff_factor``, down to ``minimum_scale``, at every other step. That timing is
    kept: the rule's own ``growth_interval`` is larger by 1.

    Departures: the ceiling is 2**126, where Flax's is the largest float32, which is no
    power of two. ``minimum_scale=None`` is 2**-126, where the scale of Flax falls to 0
    and makes NaN of every gradient.

    Args:
        growth_factor: what a growth multiplies the scale by, more than 1.
        backoff_factor: what an overflow multiplies it by, between 0 and 1.
        growth_interval: finite steps in a row before one that grows.
        scale: the first scale, from 2**-126 to 2**126. One below the least scale stays
            until an overflow raises it, as in Flax.
        minimum_scale: the least scale, 0 or more; in effect 2**-126 or more, or None.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale below the least.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.flax_dynamic_scale().growth_interval
        2001

    References:
        `flax/training/dynamic_scale.py
        <https://github.com/google/flax/blob/main/flax/training/dynamic_scale.py>`_
    """
    interval = check_count(
        "growth_interval",
        growth_interval,
        "It is how many finite steps in a row come before one that grows.",
    )
    with named(init_scale="scale", min_scale="minimum_scale"):
        return growing(
            init_scale=scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=interval + 1,
            min_scale=SMALLEST_SCALE if minimum_scale is None else minimum_scale,
        )


def mpx_dynamic(
    loss_scaling: Any,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
) -> LossScale:
    """Return the rule of ``mpx.DynamicLossScaling``.

    That of `jmp_dynamic` with a ceiling of 65504, the largest float16 and no power of
    two.

    Departures: gradients are divided by the scale that multiplied the loss, where mpx
    divides them by the next, and halves them in every growth step. The loss is
    multiplied in float32 or wider, where mpx rounds the scale to float16.

    Args:
        loss_scaling: the first scale, from 2**-126 to 2**126. One outside the limits
            comes inside with the first step, as in mpx.
        min_loss_scaling: the least scale, from 0 to 65504; in effect 2**-126 or more.
        factor: what a growth multiplies by and a backoff divides by, above 1.
        period: finite steps in a row before a growth.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale outside the
        limits.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mpx_dynamic(2.0**15).max_scale
        65504.0

    References:
        `mixed_precision_for_JAX
        <https://github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX>`_
    """
    with named(
        init_scale="loss_scaling",
        growth_factor="factor",
        growth_interval="period",
        min_scale="min_loss_scaling",
    ):
        return growing(
            init_scale=loss_scaling,
            growth_factor=factor,
            backoff_factor=reciprocal("factor", factor),
            growth_interval=period,
            min_scale=min_loss_scaling,
            max_scale=_LARGEST_HALF,
            clips_every_step=True,
        )
