"""Where the values of a program come from: from arguments that are differentiated?"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._jax_internals import inputs_of_scan, is_computed, is_ref, type_of_new_arrays
from .primitives import ONE_PROGRAM
from .rewrite import Program, jaxpr_of, programs_in, remembered, walked


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        has_tangent: whether it depends on an argument that is differentiated.
        is_argument: whether it is in memory anyway, as an argument of the function.
    """

    has_tangent: bool
    is_argument: bool


Origins = tuple[Origin, ...]
_CONSTANT = Origin(has_tangent=False, is_argument=True)


def origins_of_arguments(inputs: Sequence[jax.Array]) -> Origins:
    """Return which arrays are being differentiated, as far as that can be seen here.

    In ``jax.grad(fun)(params, x)`` these are the parameters. A ``jax.jit`` in between
    hides it: then all arrays of floating point may be.
    """
    floats = [i for i, x in enumerate(inputs) if is_inexact(x) and not is_ref(x)]
    plain = type_of_new_arrays()

    def is_transformed(x: Any) -> bool:
        return isinstance(x, jax.core.Tracer) and type(x) is not plain

    found: set[int] = set()

    @jax.custom_jvp
    def probe(*transformed: jax.Array) -> tuple[()]:
        return ()

    # JAX runs the rule at the call of `probe` if an argument is being differentiated.
    @functools.partial(probe.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        pairs = zip(transformed, tangents, strict=True)
        found.update(i for i, x in pairs if not isinstance(x, SymbolicZero))
        ask(primals)  # a derivative of a derivative
        return (), ()

    def ask(arrays: Sequence[jax.Array]) -> None:
        # Otherwise the call would only stay in the program, empty.
        if any(map(is_transformed, arrays)):
            probe(*arrays)

    transformed = [i for i in floats if is_transformed(inputs[i])]
    ask([inputs[i] for i in transformed])
    differentiated = found or floats
    return tuple(
        Origin(i in differentiated, not is_computed(x)) for i, x in enumerate(inputs)
    )


@remembered
def origin_of_variables(program: Program, inputs: Origins) -> Any:
    """Return a function that takes a variable of a program and returns its origin."""
    return walked(program, inputs, _origins_of_results, _CONSTANT)


def _origins_of_results(eqn: JaxprEqn, known: Sequence[Origin]) -> Sequence[Origin]:
    """Return the origins of the results of an equation."""
    name = eqn.primitive.name
    if name not in ONE_PROGRAM | {"scan", "cond"}:
        moves = name != "stop_gradient" and any(x.has_tangent for x in known)
        return [Origin(moves and is_inexact(x.aval), False) for x in eqn.outvars]
    ways = [
        _origins_of_outputs(program, origins_inside(eqn, program, known))
        for program in programs_in(eqn.params)
    ]
    # A loop returns copies.
    may_be_argument = name != "scan"
    return [
        Origin(
            any(x.has_tangent for x in xs),
            may_be_argument and all(x.is_argument for x in xs),
        )
        for xs in zip(*ways, strict=True)
    ]


def _origins_of_outputs(program: Program, inputs: Origins) -> Origins:
    return tuple(map(origin_of_variables(program, inputs), jaxpr_of(program).outvars))


def origins_inside(eqn: JaxprEqn, program: Program, known: Sequence[Origin]) -> Origins:
    """Return the origins of the inputs of a program inside an equation."""
    match eqn.primitive.name:
        case "scan":
            consts, carry, xs = inputs_of_scan(eqn.params, known)
            return _origins_in_any_iteration(program, consts, carry, xs)
        case "cond":
            return tuple(known[1:])
    return tuple(known)


def _origins_in_any_iteration(
    body: Program, consts: list[Origin], carry: list[Origin], xs: list[Origin]
) -> Origins:
    """Return the origins of the inputs of the body of a ``scan``."""
    carry = [Origin(x.has_tangent, False) for x in carry]
    inputs = (*consts, *carry, *xs)
    pairs = zip(carry, _origins_of_outputs(body, inputs), strict=False)
    new = [Origin(x.has_tangent or y.has_tangent, False) for x, y in pairs]
    return inputs if new == carry else _origins_in_any_iteration(body, consts, new, xs)
