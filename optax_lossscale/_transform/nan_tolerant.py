"""Decide whether a program may compute with NaN.

It may if it terminates for any input, and has no effect except communication: a NaN can
then reach only its results. The list holds the primitives that are known to be so.
"""

from jax.extend.core import Jaxpr

from .._programs.primitives import NAN_TOLERANT
from .._programs.rewrite import operations


def tolerates_nan(program: Jaxpr) -> bool:
    return operations(program) <= NAN_TOLERANT


def has_loop(program: Jaxpr) -> bool:
    """Return whether a program that tolerates NaN has a loop."""
    return "scan" in operations(program)
