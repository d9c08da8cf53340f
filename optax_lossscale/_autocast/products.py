"""Which products are computed in a narrower dtype, and why the others are not.

A product, in the code of this package, is an equation with a primitive of ``PRODUCTS``:
a matmul, a convolution, or a ``dot_general`` that is no matmul, such as ``jnp.vdot``.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .._programs.places import is_looked_into
from .._programs.primitives import PRODUCTS, TRANSPARENT
from .._programs.rewrite import Program, programs_in

# How many numbers an element of a matmul sums at least, to be cast.
FEWEST = 8


class Left(NamedTuple):
    """Why a product is left as it is."""

    reason: str  # a few words for the report
    advice: str = ""  # its part of a warning, with the fix; empty without one


DERIVATIVE = Left(
    "own derivative",
    "a function with its own derivative. Put `autocast` inside this function.",
)
_BATCH_RULE = Left(
    "own batch rule",
    "a function with its own batch rule. Put `autocast` inside this function.",
)
_PRECISION = Left(
    "precision", "a precision other than the default, which `fun` asks for."
)
_FLAG = "jax_default_matmul_precision"
_SET_PRECISION = Left(
    "precision",
    f"a precision other than the default, which `{_FLAG}` sets. Put `with "
    'jax.default_matmul_precision("default"):` around the call.',
)
_FEW = Left(
    f"fewer than {FEWEST}",
    f"that each sums fewer than {FEWEST} numbers, which is no faster in float16. Leave "
    "out `autocast`.",
)
VECTORS = Left("no matmul")
# A derivative of a product that is cast may have such shapes, and is also cast.
BY_SHAPE = (None, _FEW, VECTORS)
# These are cast by hand.
NARROW = Left("")
WIDE_RESULT = Left("float32 result")


def reasons_to_leave(
    program: Program, dtype: str, outside: Left | None = None
) -> Iterator[tuple[JaxprEqn, Left | None]]:
    """Yield each product of a program, and why it is left, or None."""
    for eqn in program.eqns:
        if eqn.primitive.name in PRODUCTS:
            yield eqn, reason_to_leave(eqn, dtype, outside)
        elif is_looked_into(eqn):
            for inner in programs_in(eqn.params):
                yield from reasons_to_leave(inner, dtype, reason_inside(eqn, outside))


def reason_inside(eqn: JaxprEqn, outside: Left | None) -> Left | None:
    """Return why all products inside of an equation are left, if there is a reason."""
    if eqn.primitive.name in TRANSPARENT:
        return outside
    return _BATCH_RULE if eqn.primitive.name == "custom_vmap_call" else DERIVATIVE


def reason_to_leave(
    eqn: JaxprEqn, dtype: str, outside: Left | None = None
) -> Left | None:
    """Return why a product is left as it is, or None if it is cast.

    ``outside`` is a reason that comes from a function around the product.

    No matrix unit computes vector products, such as ``jnp.vdot``, and outer and
    elementwise products. A rotation would lose digits without being faster.
    """
    avals: list[Any] = [x.aval for x in (*eqn.invars[:2], *eqn.outvars)]
    *operands, result = (x.dtype.name for x in avals)
    # One operand may have the narrower dtype already, such as a float16 parameter.
    if other := {*operands, result} - {"float32", dtype}:
        name = min(other)
        return Left(name, f"the dtype {name}. Give `autocast` a float32 program.")
    if result == dtype:
        return NARROW
    if "float32" not in operands:
        return WIDE_RESULT
    precision = eqn.params["precision"]
    asked = precision if isinstance(precision, tuple) else [precision]
    if any(x not in (None, jax.lax.Precision.DEFAULT) for x in asked):
        is_set = getattr(jax.config, _FLAG) is not None
        return _SET_PRECISION if is_set else _PRECISION
    if eqn.primitive.name != "dot_general":
        return outside
    contracted, batch = eqn.params["dimension_numbers"]
    is_matrix = any(
        size != 1 and axis not in (*contracted[i], *batch[i])
        for i, aval in enumerate(avals[:2])
        for axis, size in enumerate(aval.shape)
    )
    # A size that `jax.export` leaves open is no int.
    length = math.prod(avals[0].shape[i] for i in contracted[0])
    is_short = isinstance(length, int) and length < FEWEST
    if is_matrix and not is_short:
        return outside
    return _FEW if is_matrix and length != 1 else VECTORS
