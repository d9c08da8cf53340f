"""Measure how much the results change if some products are rounded."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._jax_internals import rewriting
from .._programs.names import FEW, shared_names
from .._programs.places import Place, with_eqns_inside
from .._programs.rewrite import (
    DEBUGGING,
    effect_names,
    eqn_of,
    evaluate_with_nan,
    new_var,
    refuse_effects,
)
from .._programs.traced_call import TracedCall
from .sites import Site, Sites

Group = tuple[str, str]  # a line, and a parameter or a scope


def errors_of_groups(call: TracedCall) -> dict[Group, list[float]]:
    """Return the relative change of the results in float16 and bfloat16, by group.

    The program is compiled once: its products ask the host for their dtype. A dtype
    that is an input would need a path into every loop.
    """
    refuse_effects(call.effects - DEBUGGING)
    inputs = call.inputs
    places = Sites(call)
    sites: list[Site] = []
    types: list[int] = []  # of the sites: 0 is float32, 1 float16, 2 bfloat16

    def change(eqn: Any, place: Place) -> Iterator[JaxprEqn]:
        site = places.of(eqn, place)
        if site and not site.left:
            i = len(sites)
            sites.append(site)
            yield from _rounded(eqn, lambda: np.int32(types[i]))
        elif eqn.outvars or effect_names(eqn) - DEBUGGING:
            yield eqn  # the others, which are left out, would print in every run

    # In a `jit`, JAX does not trace a `shard_map` again. Its types would be others.
    inner = jax.jit(functools.partial(evaluate_with_nan, call.jaxpr))
    traced = jax.make_jaxpr(inner)(*inputs)
    with rewriting():
        program = with_eqns_inside(traced.jaxpr, change, places.names)
    if not sites:
        raise ValueError(
            "`fun` must have float32 matmuls or convolutions that `autocast` casts if "
            "errors=True, got none. Pass `fun` without `autocast`: "
            "`ls.grad(loss_fn, opt_state)`."
        )
    run = functools.partial(evaluate_with_nan, program)
    # Otherwise XLA leaves out some of the rounding.
    compiled = jax.jit(run, compiler_options={"xla_allow_excess_precision": False})
    groups = [site.named.group for site in sites]

    def results(rounded: Iterable[Group], dtype: int) -> list[np.ndarray]:
        types[:] = [dtype * (group in rounded) for group in groups]
        arrays = jax.block_until_ready(compiled(*inputs))
        return [np.asarray(x) for x in arrays if is_inexact(x)]

    exact = results((), 0)
    size = _distance(exact, [np.zeros_like(x) for x in exact])
    if not size:
        raise ValueError(
            "`fun` must return a finite number other than 0 if errors=True, got none. "
            "Without errors=True, the report shows where NaN and inf begin."
        )

    def measured(rounded: Iterable[Group]) -> list[float]:
        return [_distance(exact, results(rounded, dtype)) / size for dtype in (1, 2)]

    return _by_group(groups, measured)


def _by_group(
    groups: Sequence[Group], measured: Callable[[Iterable[Group]], list[float]]
) -> dict[Group, list[float]]:
    """Measure equal layers together, and a few alone that make half of a large error.

    Where many layers overflow, none stands out.
    """
    names = shared_names(name for _, name in groups)
    equal: dict[Group, dict[Group, None]] = {}
    for line, name in groups:
        equal.setdefault((line, names[name]), {})[line, name] = None
    together = [(members, measured(members)) for members in equal.values()]
    found = {x: errors for members, errors in together for x in members}
    largest = sorted(together, key=lambda pair: -max(pair[1]))[:FEW]
    for members, errors in largest:
        if len(members) > 1 and max(errors) >= max(largest[0][1]) / 2:
            alone = {x: measured([x]) for x in members}
            apart = {x: y for x, y in alone.items() if max(y) >= max(errors) / 2}
            if 0 < len(apart) <= FEW:
                rest = members.keys() - apart
                found |= dict.fromkeys(rest, measured(rest)) | apart
    return found


def _rounded(eqn: JaxprEqn, dtype: Callable[[], Any]) -> Iterator[JaxprEqn]:
    """Yield equations that compute a product in the dtype that the host returns."""

    def rounded(*arrays: jax.Array) -> list[jax.Array]:
        number = jax.pure_callback(dtype, jax.ShapeDtypeStruct((), jnp.int32))
        return [_round(x, number) if x.dtype == jnp.float32 else x for x in arrays]

    operands: list[Any] = [new_var(x.aval) for x in eqn.invars]
    results: list[Any] = [new_var(x.aval) for x in eqn.outvars]
    # By default, a GPU or a TPU also rounds float32.
    params = {**eqn.params, "precision": (jax.lax.Precision.HIGHEST,) * 2}
    yield eqn_of(rounded, eqn.invars, operands)
    yield eqn.replace(invars=operands, outvars=results, params=params)
    yield eqn_of(rounded, results, eqn.outvars)


def _round(x: jax.Array, dtype: jax.Array) -> jax.Array:
    narrow = (x.astype(jnp.float16), x.astype(jnp.bfloat16))
    return jax.lax.select_n(dtype, x, *(y.astype(x.dtype) for y in narrow))


def _distance(exact: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Return the Euclidean norm of a difference, where the first ones are finite."""
    norms = []
    for x, y in zip(exact, others, strict=True):
        finite = np.isfinite(x)
        # In float64, squares neither overflow nor vanish.
        difference = y[finite].astype(complex) - x[finite].astype(complex)
        norms.append(np.linalg.norm(difference))
    return float(np.nan_to_num(np.linalg.norm(norms), nan=np.inf, posinf=np.inf))
