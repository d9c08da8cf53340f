"""The equations of a program, by what they compute."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._jax_internals import programs_in

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    ne neg nextafter not one_minus_square or polynomial population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905, dozens of lines of list otherwise
)
REDUCTIONS = frozenset(
    """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum reduce_xor
    """.split()  # noqa: SIM905
)
# They only move elements, from places that are known when the program is compiled.
RESHAPES = frozenset(
    """
    broadcast_in_dim concatenate expand_dims iota pad pcast pvary reshape rev slice
    split squeeze stack tile transpose unstack zeros_like
    """.split()  # noqa: SIM905
)


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations of a program and of the programs inside it."""
    for eqn in program.eqns:
        yield eqn
        for inner in programs_in(eqn.params):
            yield from equations(inner)


def with_programs(params: dict[str, Any], change: Callable[[Any], Any]) -> Any:
    """Return the parameters of an equation with each program in them changed."""
    return jax.tree.map(
        lambda x: change(x) if isinstance(x, ClosedJaxpr | Jaxpr) else x, params
    )


def operations(program: ClosedJaxpr | Jaxpr) -> set[str]:
    """Return the names of all primitives in a program."""
    return {eqn.primitive.name for eqn in equations(program)}
