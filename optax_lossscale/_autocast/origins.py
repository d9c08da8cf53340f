"""Where the values of a program come from: from arguments that are differentiated?"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._jax_internals import is_computed, is_differentiated
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
    found = [is_inexact(x) and is_differentiated(x) for x in inputs]
    moves = found if any(found) else map(is_inexact, inputs)
    return tuple(map(Origin, moves, (not is_computed(x) for x in inputs)))


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
