"""Choose what the body of a ``scan`` keeps for its backward pass, by counting bytes.

JAX keeps what the derivative of each operation needs. Behind a float16 product that is
float32, although it can be computed again from the float16 result. A ``jax.checkpoint``
with a policy says which operations are computed again. What an iteration then keeps can
be read from the program of its derivatives, without asking JAX for each policy.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from .._dtypes import is_inexact
from .._jax_internals import inputs_of_scan, zeros_like_aval
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM,
    ELEMENTWISE,
    ONE_PROGRAM,
    REDUCTIONS,
    RESHAPES,
)
from .rewrite import (
    COLLECTIVE,
    checkpointed,
    effect_names,
    equations,
    jaxpr_of,
    operations,
    programs_in,
)
from .tangents import Flags


def with_least_kept(body: Any, differentiated: Flags, carry: range) -> Any:
    """Return the body of a ``scan`` that keeps the fewest bytes for its backward pass.

    ``differentiated`` says which inputs of the body have tangents, and ``carry`` which
    ones it carries.
    """
    cheap = ELEMENTWISE | RESHAPES
    checkpoint = checkpointed(body, _keeps_all_but(cheap))
    if checkpoint is body:
        return body
    try:
        derivatives = _derivatives(checkpoint, differentiated)
    except NameError:  # a mapped axis, which is bound where the program runs
        return checkpoint
    if not _is_pure(derivatives):  # the rule of a `custom_vjp` may have an effect
        return body
    variables = checkpoint.eqns[0].invars
    needed = _needed(derivatives, variables, differentiated, carry)
    casts = frozenset({"convert_element_type"})
    ways = [
        # If only casts are computed again, a body keeps no more than in float32.
        (casts, _bytes(needed, casts)),
        _fewest(needed, cheap),
        # The result of a reduction is small, but what it is computed from may be kept
        # anyway.
        _fewest(needed, cheap | REDUCTIONS),
    ]
    # Of equal ways, the first one computes less again.
    recomputed, _ = min(ways, key=operator.itemgetter(1))
    return checkpointed(body, _keeps_all_but(recomputed)) if recomputed else body


def may_compute_again(body: Any) -> bool:
    """Return whether parts of a body may run twice, without a loss.

    JAX would run an inner ``while`` twice as a whole, and fails where it keeps a
    complex array for two uses. If the body has a ``jax.checkpoint``, its author has
    decided.
    """
    has_complex = any(
        jnp.iscomplexobj(x.aval)
        for eqn in equations(body)
        for x in eqn.outvars
        if is_inexact(x.aval)
    )
    is_left = has_complex or operations(body) & (CHECKPOINTS | {"while"})
    return _is_pure(body) and not is_left


def _is_pure(program: Any) -> bool:
    return effect_names(program) <= {COLLECTIVE}


def _fewest(
    needed: "_Values", recomputed: frozenset[str]
) -> tuple[frozenset[str], int]:
    """Return which primitives to compute again, of some, and the bytes that are kept.

    The results of one primitive after the other are kept, unless that takes more bytes.
    """
    fewest = _bytes(needed, recomputed)
    found = _reachable(needed, lambda x: x.operands)
    recomputed &= frozenset().union(*(x.primitives for x in found))
    for name in sorted(recomputed):  # in any order, but always the same
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


_Values = Iterable[_Value]


def _derivatives(checkpoint: Any, differentiated: Flags) -> Any:
    """Return the program of a checkpoint and of its derivatives in forward mode.

    Its inputs are constants of rules, those of the checkpoint, and their tangents.
    """
    program: Any = checkpoint
    if not isinstance(program, ClosedJaxpr):
        program = ClosedJaxpr(program, [])

    def differentiate() -> None:
        inputs = [zeros_like_aval(x.aval) for x in checkpoint.eqns[0].invars]
        moving = [*itertools.compress(inputs, differentiated)]

        def run(*moving: jax.Array) -> Any:
            rest, pairs = iter(moving), zip(inputs, differentiated, strict=True)
            return jaxpr_as_fun(program)(*(next(rest) if y else x for x, y in pairs))

        jax.jvp(run, moving, moving)

    eqns = jax.make_jaxpr(differentiate)().eqns
    [eqn] = [x for x in eqns if x.primitive.name in CHECKPOINTS]
    return eqn.params["jaxpr"]


def _needed(
    derivatives: Any, variables: Sequence[Any], differentiated: Flags, carry: range
) -> _Values:
    """Return the values that the backward pass of a body needs.

    ``variables`` are the inputs of the body. A loop keeps what it carries. Its
    constants, and what it scans over, it has anyway.
    """
    inputs = [
        _Value(_size(x) * (i in carry), frozenset({"input"}))
        for i, x in enumerate(variables)
    ]
    tangents = [_Value(is_tangent=True) for x in differentiated if x]
    constants = len(derivatives.invars) - len(inputs) - len(tangents)
    free = [_Value() for _ in range(constants)]
    outputs = _values(derivatives, [*free, *inputs, *tangents])
    is_tangent = operator.attrgetter("is_tangent")

    def operands(x: _Value) -> _Values:
        return x.operands if x.is_tangent else ()

    found = _reachable(filter(is_tangent, outputs), operands)
    return [x for x in found if not x.is_tangent]


def _values(program: Any, inputs: list[_Value], times: int = 1) -> list[_Value]:
    """Return the outputs of a program, which runs a number of times."""
    program = jaxpr_of(program)
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
        case name if name in ONE_PROGRAM:
            [program] = programs
            return _values(program, inputs, times)
    primitives = _primitives(eqn.primitive, eqn.params)
    return [_Value(times * _size(x), primitives, inputs) for x in eqn.outvars]


def _outputs_of_scan(
    params: dict[str, Any], inputs: list[_Value], times: int
) -> list[_Value]:
    consts, start, xs = inputs_of_scan(params, inputs)
    times *= params["length"]
    are_tangents = [x.is_tangent for x in start]
    while True:
        pairs = zip(start, are_tangents, strict=True)
        carry = [_Value(operands=[x], is_tangent=flag) for x, flag in pairs]
        outputs = _values(params["jaxpr"], [*consts, *carry, *xs], times)
        # The carry of the next iteration.
        for x, y in zip(carry, outputs, strict=False):
            x.operands.append(y)
        flags = [any(y.is_tangent for y in x.operands) for x in carry]
        if flags == are_tangents:
            return outputs
        are_tangents = flags


def _reachable(values: _Values, following: Callable[[_Value], _Values]) -> _Values:
    """Yield values, those that follow them, and so on."""
    seen, stack = set(), [*values]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            yield x
            stack += following(x)


def _bytes(needed: _Values, recomputed: frozenset[str]) -> int:
    """Return how many bytes are kept if some primitives are computed again."""

    def is_recomputed(x: _Value) -> bool:
        return x.primitives <= recomputed

    def operands(x: _Value) -> _Values:
        return x.operands if is_recomputed(x) else ()

    values = _reachable(needed, operands)
    return sum(x.size for x in values if not is_recomputed(x))


def _size(x: Any) -> int:
    # A size that `jax.export` leaves open is no int.
    shape = [n for n in x.aval.shape if isinstance(n, int)]
    return math.prod(shape) * x.aval.dtype.itemsize
