"""Name the operands of selections, so that a policy may keep them.

A selection, such as ``sort``, returns elements of its operand as they are. If its
result is kept and its operand is computed again, an element may differ from itself. So
the policy treats the name of an operand like the selection. Every operation counts as a
selection unless it is in ``SMOOTH``.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var

from .._dtypes import is_inexact
from .._programs.primitives import COPIES, SMOOTH, TRANSPARENT
from .._programs.rewrite import (
    Program,
    eqn_like,
    jaxpr_of,
    new_var,
    programs_in,
    remembered,
    with_eqns,
    with_programs,
)
from .residuals import operand_of, operations_of

# The names of the operations that select elements from a variable.
Selections = frozenset[str]


def with_named_operands(program: Program) -> Any:
    """Name each value that elements are selected from, once for each operation."""
    return _with_names(program, (frozenset(),) * len(jaxpr_of(program).outvars))


@remembered
def _with_names(program: Program, of_results: tuple[Selections, ...]) -> Any:
    """Name values in a program whose results are also selected from."""
    selections = _selections(program, of_results)

    def change(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        found = tuple(selections[x] for x in eqn.outvars)
        if eqn.primitive.name in TRANSPARENT:
            yield with_programs(eqn, lambda inside: _with_names(inside, found))
            return
        results, named = [*eqn.outvars], []
        for i, names in enumerate(found):
            for name in sorted(names):
                after, results[i] = results[i], new_var(results[i].aval)
                named.append(eqn_like(eqn, _naming(name), [results[i]], after))
        yield eqn.replace(outvars=results)
        yield from reversed(named)

    return with_eqns(program, change) if any(selections.values()) else program


@functools.cache
def _naming(selection: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: checkpoint_name(x, operand_of(selection))


@remembered
def _selections(program: Program, of_results: tuple[Selections, ...]) -> Any:
    """Return the selections from each variable of a program.

    Reshapes and other copies lead back to where the elements were computed.
    """
    jaxpr = jaxpr_of(program)
    found: Any = collections.defaultdict(frozenset)

    def add(variables: Any, selections: Any) -> None:
        for x, names in zip(variables, selections, strict=True):
            if isinstance(x, Var) and is_inexact(x.aval):
                found[x] |= names

    add(jaxpr.outvars, of_results)
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        of_outputs = tuple(found[x] for x in eqn.outvars)
        if name in TRANSPARENT:
            for inside in programs_in(eqn.params):
                inner = _selections(inside, of_outputs)
                inputs = jaxpr_of(inside).invars
                # The first operand of a ``cond`` is its index.
                operands = eqn.invars[len(eqn.invars) - len(inputs) :]
                add(operands, [inner[x] for x in inputs])
            continue
        operands = eqn.invars
        avals: list[Any] = [x.aval for x in operands]
        names = operations_of(eqn.primitive, avals, eqn.params) - SMOOTH
        if name in COPIES:
            operands = [x for x in operands if _fits(x, eqn.outvars[0])]
            if operands:
                names = names.union(*(found.pop(x) for x in eqn.outvars))
        add(operands, [names] * len(operands))
    return found


def _fits(x: Any, result: Any) -> bool:
    """Return whether a result holds each element of a floating-point operand."""
    dtype = result.aval.dtype
    with jax.numpy_dtype_promotion("standard"):  # the user may have chosen "strict"
        return is_inexact(x.aval) and jnp.promote_types(x.aval.dtype, dtype) == dtype
