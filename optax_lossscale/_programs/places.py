"""Where the products of a program are: their lines, scopes and passes."""

import inspect
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .._finite import CHECK_SCOPE
from .primitives import PRODUCTS
from .products import (
    BY_SHAPE,
    DERIVATIVE,
    Left,
    is_looked_into,
    reason_inside,
    reason_to_leave,
)
from .rewrite import Program, with_eqns, with_programs

# Code that is not the user's. jax may be installed in any folder. Each name ends with a
# separator, because the user's folders may begin with the same letters.
_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_THIS_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# The file of JAX that calls a derivative of the user's own.
_DERIVATIVES = inspect.unwrap(jax.custom_vjp.__call__).__code__.co_filename


class Site(NamedTuple):
    """Where a product is, and why `autocast` leaves it, if it does."""

    line: str  # of the user, for both passes
    scope: str
    is_backward: bool
    left: Left | None


class Place(NamedTuple):
    """The surroundings of an equation, and how the products before it are cast."""

    scopes: str
    reason: Left | None
    line: str
    lefts: dict[str, Left | None]  # by the lines of products

    def inside(self, eqn: JaxprEqn) -> "Place":
        # JAX names the backward pass of a checkpoint twice, as in
        # `transpose(jvp(decoder))/layers_3/jvp(decoder)/layers_3`.
        stack = str(eqn.source_info.name_stack)
        stack = re.sub(r"(transpose\(.*?)/jvp\(.*", r"\1", stack)
        reason, line = reason_inside(eqn, self.reason), _user_line(eqn) or self.line
        return Place(f"{self.scopes}/{stack}", reason, line, self.lefts)

    def site(self, eqn: JaxprEqn) -> Site | None:
        """Return where a product is, or None for another equation."""
        scopes = f"{self.scopes}/{eqn.source_info.name_stack}"
        if eqn.primitive.name not in PRODUCTS or CHECK_SCOPE in scopes:
            return None
        # Of a function that was traced before, JAX has only the lines of that time.
        line = _user_line(eqn) or self.line or _line(eqn, (_JAX,)) or "?"
        # A gradient has no call of a function with a derivative of its own any more.
        is_own = any(x.file_name == _DERIVATIVES for x in _frames(eqn))
        outside = self.reason or (DERIVATIVE if is_own else None)
        left = reason_to_leave(eqn, "float16", outside)
        is_backward = "transpose(" in scopes
        if is_backward and left in BY_SHAPE:
            # It is the derivative of a product that is cast or left.
            left = self.lefts.get(line, left)
        elif self.lefts.setdefault(line, left):
            self.lefts[line] = left
        # Without transformations, as in `transpose(jvp(decoder))/layers_3/vmap()`, and
        # without the scope that ``jax.checkpoint`` adds.
        scopes = scopes.replace("rematted_computation", "")
        names = re.findall(r"[^/()]+(?=[/)]|$)", scopes)
        return Site(line, "/".join(names), is_backward, left)


def with_eqns_inside(program: Any, change: Callable[..., Iterable[JaxprEqn]]) -> Any:
    """Replace each equation, at any depth, by those of ``change(eqn, place)``."""

    def rewritten(program: Program, place: Place) -> Any:
        def new(eqn: JaxprEqn) -> Iterable[JaxprEqn]:
            if is_looked_into(eqn):
                inside = place.inside(eqn)
                eqn = with_programs(eqn, lambda program: rewritten(program, inside))
            return change(eqn, place)

        return with_eqns(program, new)

    return rewritten(program, Place("", None, "", {}))


def is_of_user(eqn: JaxprEqn) -> bool:
    """Return whether the user's own code, not that of a library, calls an operation."""
    return _user_line(eqn) == _line(eqn, (_STANDARD, _JAX))


def _user_line(eqn: JaxprEqn) -> str:
    return _line(eqn, (_STANDARD, _JAX, *_INSTALLED))


def _line(eqn: JaxprEqn, left_out: Sequence[str]) -> str:
    # The innermost one outside of some folders, with its function.
    for frame in _frames(eqn):
        if not any(folder in frame.file_name for folder in left_out):
            file = os.path.basename(frame.file_name)
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{file}:{frame.line_num} ({function})"
    return ""


def _frames(eqn: JaxprEqn) -> Iterator[Any]:
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(_THIS_PACKAGE):
            break  # the frames outside have called this package
        yield frame
