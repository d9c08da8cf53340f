"""Note how large values are each time that a program computes them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import is_inexact
from .._finite import magnitude_bits
from .._programs.rewrite import eqn_of


def noting(variables: Sequence[Any], numbers: list[list[float]]) -> Any:
    """Return an equation that appends the largest value of each variable to a list."""

    def note(*largest: Any) -> None:
        numbers.append([float(x) for x in largest])

    def measure(*arrays: jax.Array) -> None:
        jax.debug.callback(note, *map(_largest, arrays))

    return eqn_of(measure, variables)


def _largest(x: jax.Array) -> jax.Array:
    # Unlike `max_magnitude`, it is one reduction, which compiles faster.
    x = x if is_inexact(x) else x.astype(jnp.float32)
    # On jax 0.12, the magnitude of a complex NaN may have a sign.
    return jnp.max(magnitude_bits(x) & 0x7FFFFFFF, initial=0).view(jnp.float32)
