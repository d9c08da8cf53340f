"""Let loops keep less for their backward pass: the second pass of `autocast`.

JAX keeps what the derivative of each operation needs. After a float16 matmul, that is
float32, which could be computed again from the float16 result. So this pass puts a
``jax.checkpoint`` around the body of each ``scan`` that has such matmuls. The policy of
a ``jax.checkpoint`` chooses which operations are recomputed. This pass takes the policy
that keeps the fewest bytes, out of a few.

A value that is computed again may round differently. Operations that could turn this
into a large change run only in the forward pass: see ``DECISIONS``. What elements are
selected from is not computed again either: if the result of an operation is kept, its
operands are kept if they are needed again, unless it is ``SMOOTH``.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._jax_internals import inputs_of_scan, inside_of_shard_map, like
from .._programs.primitives import (
    CHECKPOINTS,
    ELEMENTWISE,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    TRANSPARENT,
)
from .._programs.rewrite import (
    COLLECTIVE,
    Program,
    effect_names,
    equations,
    jaxpr_of,
    new_var,
    operations,
    programs_in,
    remembered,
    with_eqns,
    with_programs,
)
from .origins import ORIGINS, Origin, Origins
from .residuals import (
    Value,
    Values,
    bytes_kept,
    operand_of,
    operations_of,
    outputs_as_values,
    reachable,
    residuals,
    size_of,
)
from .selections import with_named_operands

Policy = Callable[..., bool]


@remembered
def with_less_kept(program: Program, dtype: str, inputs: Origins) -> Any:
    """Return a program whose loops keep less, if they have products in a dtype."""
    if "scan" not in operations(program):
        return program
    origin_of = ORIGINS.of_variables(program, inputs)

    def change(eqn: JaxprEqn) -> Iterable[JaxprEqn]:
        # JAX cannot differentiate a `while` backward.
        if eqn.primitive.name in TRANSPARENT - {"while"}:
            eqn = _with_less_kept_inside(eqn, dtype, [*map(origin_of, eqn.invars)])
        yield eqn

    return with_eqns(program, change)


def _with_less_kept_inside(eqn: JaxprEqn, dtype: str, known: list[Origin]) -> JaxprEqn:
    def change(program: Program) -> Any:
        inputs = ORIGINS.inside(eqn, program, known)
        new = with_less_kept(program, dtype, inputs)
        if eqn.primitive.name == "scan" and _gets_policy(program, dtype, inputs):
            constants = len(inputs_of_scan(eqn.params, inputs)[0])
            return _with_least_kept(new, inputs, constants, eqn.params["length"])
        return new

    changed = functools.partial(with_programs, eqn, change)
    is_mapped = eqn.primitive.name == "shard_map"
    return inside_of_shard_map(eqn.params, changed) if is_mapped else changed()


def _gets_policy(body: Program, dtype: str, inputs: Origins) -> bool:
    """Return whether the body of a ``scan`` gets a policy.

    If it has a ``jax.checkpoint``, its author has decided. JAX would run an inner
    ``while`` twice as a whole.
    """
    products: list[Any] = [x for x in equations(body) if x.primitive.name in PRODUCTS]
    return (
        any(x.outvars[0].aval.dtype == dtype for x in products)
        and any(x.has_tangent for x in inputs)
        and not operations(body) & (CHECKPOINTS | {"while"})
        and _is_pure(body)
    )


def _is_pure(program: Program) -> bool:
    return effect_names(program) <= {COLLECTIVE}


@remembered
def _with_least_kept(body: Any, inputs: Origins, constants: int, length: int) -> Any:
    """Return the body of a ``scan`` that keeps the fewest bytes for its backward pass.

    The first inputs are constants of the loop, which runs ``length`` times.
    """
    named = with_named_operands(body)
    inner = _checkpointed(named, None)
    checkpoint = _checkpointed(inner, _keeps_all_but(frozenset()))
    if checkpoint is named:
        return body
    try:
        kept = residuals(checkpoint, [x.has_tangent for x in inputs])
    except Exception:  # of the user's own derivative, which may never be taken
        return body
    if not _is_pure(kept):  # or one that a checkpoint may have, and would repeat
        return body

    def size(i: int) -> int:
        if inputs[i].is_argument:
            return 0  # the function has it anyway
        return size_of(kept.jaxpr.invars[i], 1 if i < constants else length)

    values = [Value(size(i), frozenset({"input"})) for i in range(len(inputs))]
    needed = outputs_as_values(kept, values, length)
    # If only casts are computed again, a body keeps no more than in float32.
    casts = frozenset({"convert_element_type", *map(operand_of, operations(body))})
    choices = [(casts, bytes_kept(needed, casts))]
    # On a CPU, XLA up to jaxlib 0.11.0 may write the derivative of a ``jnp.prod`` of
    # many numbers over its factors before it has read them, mostly if these are
    # recomputed.
    if not _has_product_with_tangent(body, inputs):
        cheap = ELEMENTWISE | RESHAPES
        # Keeping a reduction is cheap. But if its operand is kept anyway, computing it
        # again keeps nothing.
        for names in (cheap, cheap | REDUCTIONS):
            names |= {*map(operand_of, names)}
            choices.append(_without_needless(needed, names))
    # Of equal choices, the first one computes less again.
    recomputed, _ = min(choices, key=operator.itemgetter(1))
    if not recomputed:
        return body
    # JAX rounds what one operation of a checkpoint saves and another one uses, and
    # fails if it is complex. It does not look into another checkpoint inside.
    outer = inner if _has_complex(kept) else named
    return _checkpointed(outer, _keeps_all_but(recomputed))


def _has_product_with_tangent(program: Program, inputs: Origins) -> bool:
    """Return whether a ``jnp.prod`` is differentiated. `jnp.fft` has one of sizes."""
    origin_of = ORIGINS.of_variables(program, inputs)

    def found_in(eqn: JaxprEqn) -> bool:
        known = [*map(origin_of, eqn.invars)]
        if eqn.primitive.name in TRANSPARENT:
            return any(
                _has_product_with_tangent(x, ORIGINS.inside(eqn, x, known))
                for x in programs_in(eqn.params)
            )
        names = {eqn.primitive.name}.union(*map(operations, programs_in(eqn.params)))
        return "reduce_prod" in names and any(x.has_tangent for x in known)

    return any(map(found_in, program.eqns))


def _has_complex(program: Program) -> bool:
    results = (x.aval for eqn in equations(program) for x in eqn.outvars)
    return any(jnp.iscomplexobj(x) for x in results if is_inexact(x))


def _without_needless(
    needed: Values, recomputed: frozenset[str]
) -> tuple[frozenset[str], int]:
    """Return which operations to compute again, of some, and the bytes that are kept.

    The results of one operation after the other are kept, unless that takes more bytes.
    """
    fewest = bytes_kept(needed, recomputed)
    found = reachable(needed, lambda x: x.operands)
    recomputed &= frozenset().union(*(x.operations for x in found))
    for name in sorted(recomputed):  # in any order, but always the same
        fewer = recomputed - {name, operand_of(name)}
        kept = bytes_kept(needed, fewer)
        if kept <= fewest:
            fewest, recomputed = kept, fewer
    return recomputed, fewest


@functools.cache
def _keeps_all_but(recomputed: frozenset[str]) -> Policy:
    """Return a policy of ``jax.checkpoint``: is the result of an operation kept?"""

    def is_kept(primitive: Any, *operands: Any, **params: Any) -> bool:
        return not operations_of(primitive, operands, params) <= recomputed

    return is_kept


def _checkpointed(program: Program, policy: Policy | None) -> Any:
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
