"""What decides how a program runs, and not only what it computes."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Loops that a NaN may keep from ending, branches, and code that XLA does not see.
_STEERED = frozenset({"while", "cond", "pallas_call", "ffi_call"})
# Iterations of a library, until something converges.
_ITERATIVE = frozenset({"eig", "eigh", "schur", "svd"})


def steering(jaxpr: Jaxpr) -> set[Var]:
    """Return the variables on which a loop, a branch or an effect depends.

    A value that is thrown away in the end may be anything, NaN or out of date, unless
    it is one of these. Loops of the jaxpr itself do not count, only those inside of
    its equations: `bind_while` does not enter them in a step that is skipped.
    """
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if found.intersection(eqn.outvars):
            found.update(_variables(eqn.invars))
        else:
            found.update(_variables(_steering_operands(eqn)))
    return found


def _steering_operands(eqn: JaxprEqn) -> Sequence[Var | Literal]:
    inside = any(map(_is_steered, _jaxprs(eqn)))
    if eqn.primitive.name == "while":
        # The body is not entered. The condition is evaluated once.
        inside = _is_steered(eqn.params["cond_jaxpr"].jaxpr)
        return eqn.invars if inside else []
    if eqn.primitive.name == "cond" and not inside:
        return eqn.invars[:1]  # which branch
    return eqn.invars if inside or _steers(eqn) else []


def _is_steered(jaxpr: Jaxpr) -> bool:
    return any(
        _steers(eqn) or any(map(_is_steered, _jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def _steers(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    is_callback = bool(eqn.effects) or name.endswith("callback")
    return is_callback or name in _STEERED or name in _ITERATIVE


def _jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs among the parameters of an equation."""
    for parameter in eqn.params.values():
        is_several = isinstance(parameter, tuple | list)
        for value in parameter if is_several else (parameter,):
            if isinstance(value, ClosedJaxpr):
                yield value.jaxpr
            elif isinstance(value, Jaxpr):
                yield value


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
