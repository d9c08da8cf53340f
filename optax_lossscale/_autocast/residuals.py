"""Count the bytes that a program keeps for its backward pass, under any policy.

The policy of a ``jax.checkpoint`` chooses which operations are computed again. This
module asks JAX once which arrays, the residuals, a program keeps without a checkpoint.
The program that computes the residuals shows which arrays could be kept instead.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .._dtypes import is_inexact
from .._jax_internals import inputs_of_scan, zeros_like_aval
from .._programs.primitives import CALLS, CUSTOM, DECISIONS, ONE_PROGRAM
from .._programs.rewrite import Program, equations, jaxpr_of, programs_in, walked


@dataclasses.dataclass(eq=False)
class Value:
    """An array in a program.

    Attributes:
        size: in bytes, over all iterations of the loops inside of the program.
        operations: the operations that compute it; empty if it is one of its operands.
        operands: the values that it is computed from.
    """

    size: int = 0
    operations: frozenset[str] = frozenset()
    operands: list["Value"] = dataclasses.field(default_factory=list)


Values = Iterable[Value]
_FREE = Value()  # a constant


def residuals(program: Program, differentiated: Sequence[bool]) -> Any:
    """Return the program that computes the residuals of another."""
    if not isinstance(program, ClosedJaxpr):
        program = ClosedJaxpr(program, [])

    def run(*inputs: jax.Array) -> Any:
        pairs = zip(inputs, differentiated, strict=True)
        inputs = tuple(x if y else jax.lax.stop_gradient(x) for x, y in pairs)
        return jaxpr_as_fun(program)(*inputs)

    inputs = [zeros_like_aval(x.aval) for x in jaxpr_of(program).invars]
    # Without its structure, which has programs in it: a cache of JAX would keep them.
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(jax.vjp(run, *xs)[1]))(*inputs)


def outputs_as_values(program: Any, inputs: Sequence[Value], times: int) -> list[Value]:
    """Return the outputs of a program, which runs a number of times."""
    rule = functools.partial(_results_as_values, times=times)
    value_of = walked(program, inputs, rule, _FREE)
    return [*map(value_of, jaxpr_of(program).outvars)]


def _results_as_values(eqn: JaxprEqn, inputs: list[Value], times: int) -> list[Value]:
    """Return the results of an equation. JAX applies a policy inside of some."""
    programs = programs_in(eqn.params)
    match eqn.primitive.name:
        case "scan":
            consts, start, xs = inputs_of_scan(eqn.params, inputs)
            carry = [Value(operands=[x]) for x in start]
            times *= eqn.params["length"]
            outputs = outputs_as_values(programs[0], [*consts, *carry, *xs], times)
            for x, following in zip(carry, outputs, strict=False):
                x.operands.append(following)
            return outputs
        case "cond":
            index, *inputs = inputs
            branches = [outputs_as_values(x, inputs, times) for x in programs]
            return [Value(operands=[index, *xs]) for xs in zip(*branches, strict=True)]
        case name if name in ONE_PROGRAM:
            return outputs_as_values(programs[0], inputs, times)
    operands: list[Any] = [x.aval for x in eqn.invars]
    computed_by = operations_of(eqn.primitive, operands, eqn.params)
    return [Value(size_of(x, times), computed_by, inputs) for x in eqn.outvars]


def operations_of(
    primitive: Any, operands: Sequence[Any], params: dict[str, Any]
) -> frozenset[str]:
    """Return the names of an equation's operations, such as those in a function."""
    names = {_operation(primitive, operands, params)}
    for program in programs_in(params):
        for eqn in equations(program):
            avals = [x.aval for x in eqn.invars]
            names.add(_operation(eqn.primitive, avals, eqn.params))
    return frozenset(names - CALLS - CUSTOM)


def _operation(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> str:
    """Return the name of a primitive, or "decision" if it decides on floats."""
    name = primitive.name
    if name == "name" and params["name"].startswith(operand_of("")):
        return str(params["name"])
    if name not in DECISIONS or not any(map(is_inexact, operands)):
        return name
    if name == "convert_element_type" and jnp.issubdtype(
        params["new_dtype"], jnp.inexact
    ):
        return name
    return "decision"


def operand_of(selection: str) -> str:
    """Return the name of the operation that returns the operand of a selection."""
    return f"optax_lossscale: operand of {selection}"


def size_of(x: Any, times: int) -> int:
    """Return the bytes of an array that is kept a number of times."""
    # A size that `jax.export` leaves open is no int.
    sizes = [n for n in (times, *x.aval.shape) if isinstance(n, int)]
    return math.prod(sizes) * x.aval.dtype.itemsize


def bytes_kept(needed: Values, recomputed: frozenset[str]) -> int:
    """Return how many bytes are kept if some operations are computed again."""

    def is_recomputed(x: Value) -> bool:
        return x.operations <= recomputed

    def operands(x: Value) -> Values:
        return x.operands if is_recomputed(x) else ()

    values = reachable(needed, operands)
    return sum(x.size for x in values if not is_recomputed(x))


def reachable(values: Values, following: Callable[[Value], Values]) -> Values:
    """Yield values, those that follow them, and so on."""
    seen, stack = set(), [*values]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            yield x
            stack += following(x)
