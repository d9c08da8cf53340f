"""Where the equations of a program are: their lines, scopes and passes."""

import functools
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .facts import Facts
from .primitives import CUSTOM, TRANSPARENT
from .rewrite import Program, with_eqns, with_programs

# Code that is not the user's. jax may be installed in any folder. Each name ends with a
# separator, because the user's folders may begin with the same letters.
_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_THIS_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


BACKWARD = ", backward"  # what follows a line of the backward pass


class Place(NamedTuple):
    """The surroundings of an equation."""

    around: tuple[JaxprEqn, ...] = ()  # the equations that it is inside of
    scopes: str = ""
    line: str = ""
    iteration: str = ""  # of the loops, if they run step by step
    fact_of: Callable[[Any], Any] = str  # the fact about a variable beside it

    def inside(self, eqn: JaxprEqn) -> "Place":
        # JAX names the backward pass of a checkpoint twice, as in
        # `transpose(jvp(decoder))/layers_3/jvp(decoder)/layers_3`.
        stack = str(eqn.source_info.name_stack)
        stack = re.sub(r"(transpose\(.*?)/jvp\(.*", r"\1", stack)
        line, around = _user_line(eqn) or self.line, (*self.around, eqn)
        return Place(around, f"{self.scopes}/{stack}", line, self.iteration)

    def where(self, eqn: JaxprEqn) -> "Where":
        """Return the line, the scope and the pass of an equation."""
        # Of a function that was traced before, JAX keeps the lines of the first trace.
        line = _user_line(eqn) or self.line or _line(eqn, (_JAX,)) or "?"
        scopes = f"{self.scopes}/{eqn.source_info.name_stack}"
        is_backward = "transpose(" in scopes
        # Without transformations, as in `transpose(jvp(decoder))/layers_3/vmap()`, and
        # without the scope that ``jax.checkpoint`` adds.
        scopes = scopes.replace("rematted_computation", "")
        names = re.findall(r"[^/()]+(?=[/)]|$)", scopes)
        return Where(line, "/".join(names), is_backward)


class Where(NamedTuple):
    """What a report shows of an equation."""

    line: str  # of the user, for both passes
    scope: str
    is_backward: bool

    @property
    def text(self) -> str:
        return self.line + BACKWARD * self.is_backward


def with_eqns_inside(
    program: Any,
    change: Callable[..., Iterable[JaxprEqn]],
    facts: Facts[Any] | None = None,
) -> Any:
    """Replace each equation, at any depth, by those of ``change(eqn, place)``.

    ``place.fact_of`` tells the fact about an operand or a result.
    """

    def rewritten(program: Program, place: Place, inputs: Sequence[Any]) -> Any:
        if facts:
            place = place._replace(fact_of=facts.of_variables(program, inputs))

        def inside(eqn: JaxprEqn, program: Program) -> Any:
            inputs: Sequence[Any] = ()
            if facts:
                known = [*map(place.fact_of, eqn.invars)]
                inputs = facts.inside(eqn, program, known)
            return rewritten(program, place.inside(eqn), inputs)

        def new(eqn: JaxprEqn) -> Iterable[JaxprEqn]:
            if is_looked_into(eqn):
                eqn = with_programs(eqn, functools.partial(inside, eqn))
            return change(eqn, place)

        return with_eqns(program, new)

    return rewritten(program, Place(), facts.inputs if facts else ())


def is_looked_into(eqn: JaxprEqn) -> bool:
    """Return whether the equations inside are listed. Those of a kernel are not."""
    return eqn.primitive.name in TRANSPARENT | CUSTOM


def is_of_user(eqn: JaxprEqn) -> bool:
    """Return whether the user's own code, not that of a library, calls an operation."""
    return _user_line(eqn) == _line(eqn, (_STANDARD, _JAX))


def _user_line(eqn: JaxprEqn) -> str:
    return _line(eqn, (_STANDARD, _JAX, *_INSTALLED))


def _line(eqn: JaxprEqn, left_out: Sequence[str]) -> str:
    # The innermost one outside of some folders, with its function.
    for frame in frames(eqn):
        if not any(folder in frame.file_name for folder in left_out):
            file = os.path.basename(frame.file_name)
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{file}:{frame.line_num} ({function})"
    return ""


def frames(eqn: JaxprEqn) -> Iterator[Any]:
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(_THIS_PACKAGE):
            break  # the frames outside have called this package
        yield frame
