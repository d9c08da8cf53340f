"""Updates that set narrow parameters exactly to rounded master weights."""

from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import Leaf, dtype_of
from .._tree import as_sharded


def update_to(master: jax.Array, param: Leaf) -> jax.Array:
    """Return the update that sets a parameter to its rounded master weight."""
    narrow, param = dtype_of(param), jnp.asarray(param, master.dtype)
    target = round_to(master, narrow)
    # Equal infinities need an update of 0: inf - inf is NaN.
    update = jnp.where(target == param, 0, target - param)
    # A parameter of 0 gets the master weight itself, which keeps the sign of a zero.
    is_zero = as_sharded(param == 0, master)
    return jnp.where(is_zero, master, update)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Round to the precision of a narrower type, to nearest, ties to even.

    Two casts would do the same, but XLA may remove them on GPUs and TPUs, to keep more
    digits. A number above the largest one of the type stays finite.
    """
    # The derivative of a cast. A ``jax.custom_jvp`` would be lost in second derivatives
    # of a ``scan``. Subtracting 0 keeps the sign of a zero.
    zero = jnp.where(jnp.isfinite(x), jax.lax.stop_gradient(x) - x, 0)
    x = jax.lax.stop_gradient(x)
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    y = jax.lax.reduce_precision(x, wide.nexp, narrow.nmant)
    if narrow.minexp > wide.minexp:
        least = float(narrow.smallest_subnormal)
        even = jax.lax.RoundingMethod.TO_NEAREST_EVEN
        subnormal = jax.lax.round(x * (1 / least), even) * least
        y = jnp.where(jnp.abs(x) < float(narrow.tiny), subnormal, y)
    return y - zero
