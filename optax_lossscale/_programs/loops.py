"""Choose what the body of a ``scan`` keeps for its backward pass, by counting bytes.

JAX keeps what the derivative of each operation needs. After a float16 product, that is
float32, which could be computed again from the float16 result. A ``jax.checkpoint``
with a policy says which operations are computed again. JAX is asked once what a body
keeps without one. The program that computes it shows what any policy would keep.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .._dtypes import is_inexact
from .._jax_internals import inputs_of_scan, zeros_like_aval
from .origins import Origins
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM,
    ELEMENTWISE,
    EQUALITY,
    MAXIMA,
    ONE_PROGRAM,
    REDUCTIONS,
    RESHAPES,
)
from .rewrite import (
    COLLECTIVE,
    effect_names,
    equations,
    jaxpr_of,
    like,
    new_var,
    operations,
    programs_in,
    walked,
)


def with_least_kept(body: Any, inputs: Origins, constants: int, length: int) -> Any:
    """Return the body of a ``scan`` that keeps the fewest bytes for its backward pass.

    The first inputs are constants of the loop, which runs ``length`` times.
    """
    checkpoint = _checkpointed(body, _keeps_all_but(frozenset()))
    if checkpoint is body:
        return body
    try:
        kept = _kept(checkpoint, [x.has_tangent for x in inputs])
    except NotImplementedError:  # an effect in the rule of a `custom_vjp`
        return body
    if not _is_pure(kept):  # or one that a checkpoint may have, and would repeat
        return body

    def size(i: int) -> int:
        if inputs[i].is_argument:
            return 0  # the function has it anyway
        return _size(kept.jaxpr.invars[i], 1 if i < constants else length)

    values = [_Value(size(i), frozenset({"input"})) for i in range(len(inputs))]
    needed = _values(kept, values, length)
    # If only casts are computed again, a body keeps no more than in float32.
    casts = frozenset({"convert_element_type"})
    ways = [(casts, _bytes(needed, casts))]
    names = operations(body)
    # On a CPU, XLA up to jaxlib 0.11.0 may write the derivative of a product of many
    # numbers over its factors before it has read them, mostly if these are recomputed.
    if "reduce_prod" not in names:
        cheap = ELEMENTWISE | RESHAPES
        if names & MAXIMA:
            cheap -= EQUALITY
        # Keeping a reduction is cheap. But if its operand is kept anyway, computing it
        # again keeps nothing.
        ways += [_fewest(needed, cheap), _fewest(needed, cheap | REDUCTIONS)]
    # Of equal ways, the first one computes less again.
    recomputed, _ = min(ways, key=operator.itemgetter(1))
    return _checkpointed(body, _keeps_all_but(recomputed)) if recomputed else body


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


def _checkpointed(program: Any, policy: Callable[..., bool]) -> Any:
    """Return a program that is one ``jax.checkpoint``.

    Without ``prevent_cse``, which the bodies of loops do not need.
    """
    outer = jaxpr_of(program)
    fun = jax.checkpoint(jnp.negative, policy=policy, prevent_cse=False)
    (new,) = jax.make_jaxpr(fun)(0.0).jaxpr.eqns
    if new.primitive.name not in CHECKPOINTS:
        return program  # the flag `jax_remat3` makes another primitive
    inner = outer.replace(constvars=[], invars=[*outer.constvars, *outer.invars])
    results = [new_var(x.aval) for x in outer.outvars]
    new = new.replace(
        ctx=outer.eqns[0].ctx,  # such as the mesh of a `shard_map` around it
        invars=inner.invars,
        outvars=results,
        params={**new.params, "jaxpr": inner},
        effects=outer.effects,
    )
    return like(program, outer.replace(eqns=[new], outvars=results))


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


@dataclasses.dataclass(eq=False)
class _Value:
    """An array in a program.

    Attributes:
        size: in bytes, over all iterations of the loops inside of the program.
        primitives: what computes it from its operands. Nothing, if it is one of these.
        operands: what it is computed from.
    """

    size: int = 0
    primitives: frozenset[str] = frozenset()
    operands: list["_Value"] = dataclasses.field(default_factory=list)


_Values = Iterable[_Value]
_FREE = _Value()  # a constant


def _kept(program: Any, differentiated: Sequence[bool]) -> Any:
    """Return the program that computes what another keeps for its backward pass."""
    if not isinstance(program, ClosedJaxpr):
        program = ClosedJaxpr(program, [])

    def run(*inputs: jax.Array) -> Any:
        pairs = zip(inputs, differentiated, strict=True)
        inputs = tuple(x if y else jax.lax.stop_gradient(x) for x, y in pairs)
        return jaxpr_as_fun(program)(*inputs)

    inputs = [zeros_like_aval(x.aval) for x in jaxpr_of(program).invars]
    return jax.make_jaxpr(lambda *inputs: jax.vjp(run, *inputs)[1])(*inputs)


def _values(program: Any, inputs: list[_Value], times: int) -> list[_Value]:
    """Return the outputs of a program, which runs a number of times."""
    value_of = walked(program, inputs, functools.partial(_outputs, times=times), _FREE)
    return [*map(value_of, jaxpr_of(program).outvars)]


def _outputs(eqn: JaxprEqn, inputs: list[_Value], times: int) -> list[_Value]:
    """Return the results of an equation. JAX applies a policy inside of some."""
    programs = programs_in(eqn.params)
    match eqn.primitive.name:
        case "scan":
            consts, start, xs = inputs_of_scan(eqn.params, inputs)
            carry = [_Value(operands=[x]) for x in start]
            times *= eqn.params["length"]
            outputs = _values(programs[0], [*consts, *carry, *xs], times)
            for x, following in zip(carry, outputs, strict=False):
                x.operands.append(following)
            return outputs
        case "cond":
            index, *inputs = inputs
            branches = [_values(x, inputs, times) for x in programs]
            return [_Value(operands=[index, *xs]) for xs in zip(*branches, strict=True)]
        case name if name in ONE_PROGRAM:
            return _values(programs[0], inputs, times)
    primitives = _primitives(eqn.primitive, eqn.params)
    return [_Value(_size(x, times), primitives, inputs) for x in eqn.outvars]


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


def _size(x: Any, times: int) -> int:
    """Return the bytes of an array that is kept a number of times."""
    # A size that `jax.export` leaves open is no int.
    sizes = [n for n in (times, *x.aval.shape) if isinstance(n, int)]
    return math.prod(sizes) * x.aval.dtype.itemsize
