"""Which values of a program have tangents: what depends on what is differentiated."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Var

from .._dtypes import is_inexact
from .._jax_internals import inputs_of_scan, is_ref
from .primitives import ONE_PROGRAM
from .rewrite import Program, jaxpr_of, programs_in

Flags = tuple[bool, ...]


def being_differentiated(inputs: Sequence[jax.Array]) -> Flags:
    """Return which arrays are being differentiated, as far as that can be seen here.

    In ``jax.grad(fun)(params, x)`` these are the parameters. A ``jax.jit`` in between
    hides it: then all arrays of floating point may be.
    """
    floats = [i for i, x in enumerate(inputs) if is_inexact(x) and not is_ref(x)]
    found: set[int] = set()

    # Its rule runs as soon as it is called with what is being differentiated.
    @jax.custom_jvp
    def probe(*floats: jax.Array) -> tuple[()]:
        return ()

    @functools.partial(probe.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        pairs = zip(floats, tangents, strict=True)
        found.update(i for i, x in pairs if not isinstance(x, SymbolicZero))
        return probe(*primals), ()  # a derivative of a derivative

    probe(*(inputs[i] for i in floats))
    return tuple(i in (found or floats) for i in range(len(inputs)))


def with_tangents(program: Program, flags: Flags) -> Flags:
    """Return which outputs of a program have tangents, if these inputs have."""
    known = Known(program, flags)
    for eqn in jaxpr_of(program).eqns:
        known.add(eqn)
    return known.of(jaxpr_of(program).outvars)


class Known:
    """The variables of a program that have tangents, up to one of its equations."""

    def __init__(self, program: Program, flags: Flags):
        pairs = zip(jaxpr_of(program).invars, flags, strict=True)
        self._variables = {x for x, flag in pairs if flag}

    def of(self, variables: Sequence[Any]) -> Flags:
        return tuple(isinstance(x, Var) and x in self._variables for x in variables)

    def add(self, eqn: JaxprEqn) -> None:
        """Add the results of the next equation."""
        flags = _of_results(eqn, self.of(eqn.invars))
        pairs = zip(eqn.outvars, flags, strict=True)
        self._variables |= {x for x, flag in pairs if flag}


def carried_on(params: dict[str, Any], flags: Flags) -> Flags:
    """Return which inputs of the body of a ``scan`` have tangents in an iteration."""
    outputs = with_tangents(params["jaxpr"], flags)
    consts, carry, xs = inputs_of_scan(params, flags)
    pairs = zip(carry, outputs, strict=False)
    new = (*consts, *(a or b for a, b in pairs), *xs)
    return flags if new == flags else carried_on(params, new)


def inputs_of(eqn: JaxprEqn, program: Program, flags: Flags) -> Flags:
    """Return which inputs of a program inside an equation have tangents."""
    match eqn.primitive.name:
        case "cond":
            return flags[1:]
        case "while":  # its condition and its body share the inputs of the equation
            return tuple(is_inexact(x.aval) for x in jaxpr_of(program).invars)
    return flags


def _of_results(eqn: JaxprEqn, flags: Flags) -> Flags:
    programs = programs_in(eqn.params)
    match eqn.primitive.name:
        case "stop_gradient":
            return (False,) * len(eqn.outvars)
        case "scan":
            [body] = programs
            return with_tangents(body, carried_on(eqn.params, flags))
        case "cond":
            branches = [with_tangents(x, inputs_of(eqn, x, flags)) for x in programs]
            return tuple(map(any, zip(*branches, strict=True)))
        case name if name in ONE_PROGRAM:
            [program] = programs
            return with_tangents(program, flags)
    return tuple(any(flags) and is_inexact(x.aval) for x in eqn.outvars)
