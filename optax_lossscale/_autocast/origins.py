"""Where the values of a program come from: from arguments that are differentiated?"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._jax_internals import is_computed, is_ref, type_of_new_arrays
from .._programs.facts import Facts


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        has_tangent: whether it depends on an argument that is differentiated.
        is_argument: whether it is in memory anyway, as an argument of the function.
    """

    has_tangent: bool
    is_argument: bool


Origins = tuple[Origin, ...]


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


class _Origins(Facts[Origin]):
    constant = Origin(has_tangent=False, is_argument=True)

    def of_operation(self, eqn: JaxprEqn, known: Sequence[Origin]) -> list[Origin]:
        moves = any(x.has_tangent for x in known)
        moves &= eqn.primitive.name != "stop_gradient"
        return [Origin(moves and is_inexact(x.aval), False) for x in eqn.outvars]

    def joined(self, one: Origin, other: Origin) -> Origin:
        return Origin(
            one.has_tangent or other.has_tangent, one.is_argument and other.is_argument
        )

    def of_loop(self, fact: Origin) -> Origin:
        return Origin(fact.has_tangent, False)  # a loop copies


ORIGINS = _Origins()
