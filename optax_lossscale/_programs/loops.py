"""Choose what the body of a ``scan`` keeps for its backward pass, by counting bytes.

JAX keeps what the derivative of each operation needs. Behind a float16 product that is
float32, although it can be computed again from the float16 result. A ``jax.checkpoint``
with a policy says which operations are computed again. What an iteration then keeps can
be read from the program of its derivatives, without asking JAX for each policy.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from .._dtypes import is_inexact
from .._jax_internals import zeros_like_aval
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM,
    ELEMENTWISE,
    REDUCTIONS,
    RESHAPES,
)
from .rewrite import COLLECTIVE, checkpointed, effect_names, operations, programs_in


def may_compute_again(body: Any) -> bool:
    """Return whether parts of a body may run twice, without a loss.

    JAX would run an inner ``while`` twice as a whole. If the body has a
    ``jax.checkpoint``, its author has decided.
    """
    return _is_pure(body) and not operations(body) & (CHECKPOINTS | {"while"})


def _is_pure(program: Any) -> bool:
    return effect_names(program) <= {COLLECTIVE}


def with_least_kept(body: Any, consts: int, carry: int) -> Any:
    """Return the body of a ``scan`` that keeps the fewest bytes for its backward pass.

    The first inputs of the body are ``consts`` constants and ``carry`` carried arrays.
    """
    cheap = ELEMENTWISE | RESHAPES
    checkpoint = checkpointed(body, _keeps_all_but(cheap))
    if checkpoint is body:
        return body
    try:
        derivatives = _derivatives(checkpoint)
    except NameError:  # a mapped axis, which is bound where the program runs
        return checkpoint
    if not _is_pure(derivatives):  # the rule of a `custom_vjp` may have an effect
        return body
    needed = _needed(
        derivatives, checkpoint.eqns[0].invars, range(consts, consts + carry)
    )
    # The result of a reduction is small, but what it is computed from may be kept
    # anyway. Of equal ways, the first one computes less again.
    ways = [_fewest(needed, x) for x in (cheap, cheap | REDUCTIONS)]
    recomputed, _ = min(ways, key=operator.itemgetter(1))
    return checkpointed(body, _keeps_all_but(recomputed)) if recomputed else body


def _fewest(
    needed: Iterable["_Value"], recomputed: frozenset[str]
) -> tuple[frozenset[str], int]:
    """Return which primitives to compute again, of some, and the bytes that are kept.

    The results of one primitive after the other are kept, unless that takes more bytes.
    """
    fewest = _bytes(needed, recomputed)
    found = frozenset().union(*(x.primitives for x in _reachable(needed, bool)))
    recomputed &= found
    for name in sorted(recomputed):
        kept = _bytes(needed, recomputed - {name})
        if kept <= fewest:
            fewest, recomputed = kept, recomputed - {name}
    return recomputed, fewest


@functools.cache
def _keeps_all_but(recomputed: frozenset[str]) -> Callable[..., bool]:
    """Return a policy of ``jax.checkpoint``: is the result of an operation kept?"""

    def is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
        return not _primitives(primitive, params) <= recomputed

    return is_kept


def _primitives(primitive: Any, params: dict[str, Any]) -> frozenset[str]:
    """Return the names of what an operation computes, such as those in a function."""
    inside = frozenset().union(*map(operations, programs_in(params)))
    return (inside | {primitive.name}) - CALLS - CUSTOM


class _Value:
    """An array in the program of the derivatives of a body.

    Attributes:
        size: in bytes, over all iterations of the loops inside of the body.
        primitives: what computes it from its operands. Nothing, if it is one of these.
        operands: what it is computed from.
        is_tangent: whether it depends on a tangent. The backward pass computes it.
    """

    def __init__(
        self,
        size: int = 0,
        primitives: frozenset[str] = frozenset(),
        operands: Iterable["_Value"] = (),
        *,
        is_tangent: bool = False,
    ):
        self.size = size
        self.primitives = primitives
        self.operands = [*operands]
        self.is_tangent: bool = is_tangent or any(x.is_tangent for x in self.operands)


def _derivatives(checkpoint: Any) -> Any:
    """Return the program of a checkpoint and of its derivatives in forward mode.

    Its inputs are constants of rules, those of the checkpoint, and tangents of those of
    floating point, which are all differentiated.
    """
    program: Any = checkpoint
    if not isinstance(program, ClosedJaxpr):
        program = ClosedJaxpr(program, [])

    def differentiate() -> None:
        inputs = [zeros_like_aval(x.aval) for x in checkpoint.eqns[0].invars]
        floats = [x for x in inputs if is_inexact(x)]

        def of_floats(*floats: Any) -> Any:
            rest = iter(floats)
            return jaxpr_as_fun(program)(
                *(next(rest) if is_inexact(x) else x for x in inputs)
            )

        jax.jvp(of_floats, floats, floats)

    eqns = jax.make_jaxpr(differentiate)().eqns
    [eqn] = [x for x in eqns if x.primitive.name in CHECKPOINTS]
    return eqn.params["jaxpr"]


def _needed(derivatives: Any, variables: Sequence[Any], carry: range) -> list[_Value]:
    """Return the values that the backward pass of a body needs.

    ``variables`` are the inputs of the body, and ``carry`` the places of what it
    carries. A loop keeps that. Its constants, and what it scans over, it has anyway.
    """
    inputs = [
        _Value(_size(x) * (i in carry), frozenset({"input"}))
        for i, x in enumerate(variables)
    ]
    tangents = [_Value(is_tangent=True) for x in variables if is_inexact(x.aval)]
    constants = len(derivatives.invars) - len(inputs) - len(tangents)
    everything = [*(_Value() for _ in range(constants)), *inputs, *tangents]
    is_tangent = operator.attrgetter("is_tangent")
    outputs = filter(is_tangent, _values(derivatives, everything))
    return [x for x in _reachable(outputs, is_tangent) if not x.is_tangent]


def _values(program: Any, inputs: list[_Value], times: int = 1) -> list[_Value]:
    """Return the outputs of a program, which runs a number of times."""
    program = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    constants = [_Value() for _ in program.constvars]
    pairs = zip([*program.constvars, *program.invars], constants + inputs, strict=True)
    known: dict[Any, _Value] = dict(pairs)

    def read(x: Any) -> _Value:
        return known[x] if isinstance(x, Var) else _Value()

    for eqn in program.eqns:
        outputs = _outputs(eqn, [*map(read, eqn.invars)], times)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, program.outvars)]


def _outputs(eqn: JaxprEqn, inputs: list[_Value], times: int) -> list[_Value]:
    """Return the results of an equation. JAX applies a policy inside of some."""
    programs = programs_in(eqn.params)
    match eqn.primitive.name:
        case "scan":
            return _outputs_of_scan(eqn.params, inputs, times)
        case "cond":
            index, *inputs = inputs
            branches = [_values(x, inputs, times) for x in programs]
            return [_Value(operands=[index, *xs]) for xs in zip(*branches, strict=True)]
        case name if name in CALLS | {"shard_map"}:
            [program] = programs
            return _values(program, inputs, times)
    primitives = _primitives(eqn.primitive, eqn.params)
    return [_Value(times * _size(x), primitives, inputs) for x in eqn.outvars]


def _outputs_of_scan(
    params: dict[str, Any], inputs: list[_Value], times: int
) -> list[_Value]:
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, start, xs = inputs[:first], inputs[first:last], inputs[last:]
    flags: list[bool] | None = None
    are_tangents = [x.is_tangent for x in start]
    while are_tangents != flags:
        flags = are_tangents
        pairs = zip(start, flags, strict=True)
        carry = [_Value(operands=[x], is_tangent=flag) for x, flag in pairs]
        outputs = _values(
            params["jaxpr"], [*consts, *carry, *xs], times * params["length"]
        )
        # An output may be an input of the next iteration.
        are_tangents = [
            flag or x.is_tangent for flag, x in zip(flags, outputs, strict=False)
        ]
    for x, y in zip(carry, outputs, strict=False):
        x.operands.append(y)
    return outputs


def _reachable(
    values: Iterable[_Value], goes_on: Callable[[_Value], bool]
) -> Iterator[_Value]:
    """Yield values, and the operands of those at which it goes on."""
    seen, stack = set(), [*values]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            yield x
            if goes_on(x):
                stack += x.operands


def _bytes(needed: Iterable[_Value], recomputed: frozenset[str]) -> int:
    """Return how many bytes are kept if some primitives are computed again."""

    def is_recomputed(x: _Value) -> bool:
        return x.primitives <= recomputed

    values = _reachable(needed, is_recomputed)
    return sum(x.size for x in values if not is_recomputed(x))


def _size(x: Any) -> int:
    # A size that `jax.export` leaves open is no int.
    shape = [n for n in x.aval.shape if isinstance(n, int)]
    return math.prod(shape) * x.aval.dtype.itemsize
