"""Which operations are products, and why one is not computed in a narrower type."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._jax_internals import programs_in

PRODUCTS = frozenset(
    ["conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"]
)
# How many numbers a matrix product sums up at least.
FEWEST = 8
CHECKPOINTS = frozenset(["checkpoint", "remat2"])
# Equations whose programs are evaluated and differentiated as they stand. Others, such
# as ``custom_vjp_call``, have a derivative that was written for their types.
TRANSPARENT = CHECKPOINTS | {
    *("jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "shard_map"),
    *("composite", "custom_vmap_call"),
}
# Kernels and solvers are not looked into.
_LOOKED_INTO = TRANSPARENT | {
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
}

# Why a product is left as it is.
DERIVATIVE = "own derivative"
PRECISION = "precision"
FEW = f"fewer than {FEWEST}"
VECTORS = "no matrix product"
WIDE_RESULT = "float32 result"


def reasons_to_leave(
    program: ClosedJaxpr | Jaxpr, dtype: str, inside: str = ""
) -> Iterator[str]:
    """Yield for each product of a program why it is left, or ""."""
    for eqn in program.eqns:
        if eqn.primitive.name in PRODUCTS:
            yield reason_to_leave(eqn, dtype, inside)
        elif is_looked_into(eqn):
            for inner in programs_in(eqn.params):
                yield from reasons_to_leave(inner, dtype, reason_inside(eqn, inside))


def is_looked_into(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _LOOKED_INTO


def reason_inside(eqn: JaxprEqn, outside: str) -> str:
    """Return why a product inside of an equation is left, or "" if it need not be."""
    return outside if eqn.primitive.name in TRANSPARENT else DERIVATIVE


def reason_to_leave(eqn: JaxprEqn, dtype: str, inside: str = "") -> str:
    """Return why a product is not computed in a narrower type, or "" if it is.

    ``inside`` is the reason that comes from what the product is inside of.

    Uses of ``dot_general`` that are no matrix product, and that no matrix unit
    computes, are sums of products, as in ``jnp.vdot``, and outer and elementwise
    products. A product of a few numbers, such as a rotation, loses digits for nothing.
    """
    avals: list[Any] = [x.aval for x in (*eqn.invars[:2], *eqn.outvars)]
    *operands, result = (x.dtype.name for x in avals)
    # One operand may have the narrower type already, such as a float16 parameter.
    if other := {*operands, result} - {"float32", dtype}:
        return min(other)
    if "float32" not in operands or result == dtype:
        return dtype if result == dtype else WIDE_RESULT
    precision = eqn.params["precision"]
    asked = precision if isinstance(precision, tuple) else [precision]
    if any(x not in (None, jax.lax.Precision.DEFAULT) for x in asked):
        return PRECISION
    if eqn.primitive.name != "dot_general":
        return inside
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
        return inside
    return FEW if is_matrix and length != 1 else VECTORS
