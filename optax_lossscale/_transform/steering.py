"""Find the variables that decide how a program runs, not only what it computes."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._jax_internals import COLLECTIVE, DEBUGGING, effect_names

# Loops that may never end on a NaN, branches, and code that XLA cannot see into.
_STEERED = frozenset({"while", "cond", "pallas_call", "ffi_call"})
# Library routines that iterate until they converge.
_ITERATIVE = frozenset({"eig", "eigh", "schur", "svd"})
# Primitives that do much work per number that they write.
_COSTLY = frozenset(
    {"cholesky", "conv_general_dilated", "dot_general", "fft", "lu", "qr", "scan"}
    | {"sort", "triangular_solve", "cumlogsumexp", "cummax", "cummin", "cumprod"}
    | {"cumsum", "random_bits", "threefry2x32"}
)


def steering(jaxpr: Jaxpr) -> set[Var]:
    """Return the variables that a loop, a branch or an effect depends on.

    Any other value that is discarded in the end may be anything: NaN or out of date.
    """
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if found.intersection(eqn.outvars):
            found.update(_variables(eqn.invars))
        else:
            found.update(_variables(_steering_operands(eqn)))
    return found


def may_be_left_out(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a loop that need not run if its step is skipped.

    A loop with a collective must run, because every device must reach it. So must one
    with a callback that is not for debugging, because ``jax.vmap`` refuses callbacks in
    a loop that only some members enter.
    """
    return eqn.primitive.name == "while" and effect_names(eqn) <= DEBUGGING


def may_be_repeated(eqn: JaxprEqn) -> bool:
    """Return whether an equation computes little more than it writes.

    That excludes reductions, loops, matrix products, and anything with an effect.
    """
    read, written = (
        max((getattr(x.aval, "size", 1) for x in atoms), default=1)
        for atoms in (eqn.invars, eqn.outvars)
    )
    return (
        read <= written
        and not effect_names(eqn)
        and not _steers(eqn)
        and eqn.primitive.name not in _COSTLY
        and all(map(may_be_repeated, (e for j in _jaxprs(eqn) for e in j.eqns)))
    )


def may_have_custom_derivatives(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr may be wrapped in ``jax.custom_jvp``.

    It may not if it has mutable arrays, callbacks that must happen, or a function with
    a ``jax.custom_vjp``, which has no forward mode.
    """
    return all(
        effect_names(eqn) <= {COLLECTIVE, *DEBUGGING}
        and not eqn.primitive.name.startswith("custom_vjp_call")
        and all(map(may_have_custom_derivatives, _jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _steering_operands(eqn: JaxprEqn) -> Sequence[Var | Literal]:
    inside = any(map(_is_steered, _jaxprs(eqn)))
    if eqn.primitive.name == "cond" and not inside:
        return eqn.invars[:1]  # which branch
    return eqn.invars if inside or _steers(eqn) else []


def _is_steered(jaxpr: Jaxpr) -> bool:
    return any(
        _steers(eqn) or any(map(_is_steered, _jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def _steers(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    is_callback = bool(effect_names(eqn) - {COLLECTIVE}) or name.endswith("callback")
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
