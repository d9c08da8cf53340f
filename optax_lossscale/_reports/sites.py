"""The products of a program: where they are, and why `autocast` leaves them."""

import inspect
from typing import NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .._autocast.products import (
    BY_SHAPE,
    DERIVATIVE,
    Left,
    reason_inside,
    reason_to_leave,
)
from .._finite import CHECK_SCOPE
from .._programs.names import Named, Names
from .._programs.places import Place, frames
from .._programs.primitives import PRODUCTS
from .._programs.traced_call import TracedCall

# The file of JAX that calls a derivative of the user's own.
_DERIVATIVES = inspect.unwrap(jax.custom_vjp.__call__).__code__.co_filename


class Site(NamedTuple):
    """Where a product is, and why `autocast` leaves it, if it does."""

    named: Named
    left: Left | None


class Sites:
    """Finds products, in the order of the program."""

    def __init__(self, call: TracedCall) -> None:
        self.names = Names(call)
        self._lefts: dict[str, Left | None] = {}  # by the lines of products

    def of(self, eqn: JaxprEqn, place: Place) -> Site | None:
        """Return where a product is, or None for another equation."""
        scopes = f"{place.scopes}/{eqn.source_info.name_stack}"
        if eqn.primitive.name not in PRODUCTS or CHECK_SCOPE in scopes:
            return None
        named = self.names.note(eqn, place)
        where = named.where
        # In a gradient, the call of the user's own derivative is gone.
        is_own = any(x.file_name == _DERIVATIVES for x in frames(eqn))
        outside = DERIVATIVE if is_own else None
        for x in place.around:
            outside = reason_inside(x, outside)
        left = reason_to_leave(eqn, "float16", outside)
        if where.is_backward and left in BY_SHAPE:
            # It is the derivative of a product that is cast or left.
            left = self._lefts.get(where.line, left)
        elif self._lefts.setdefault(where.line, left):
            self._lefts[where.line] = left
        return Site(named, left)
