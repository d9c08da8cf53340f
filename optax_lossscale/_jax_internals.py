"""Calls of jax internals. Differences between versions of jax are handled only here."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import ad

# Effects, by the names of their classes, which jax does not export.
COLLECTIVE = "NamedAxisEffect"
DEBUGGING = frozenset({"DebugEffect", "OrderedDebugEffect"})
_TRACE_STATE = "get_opaque_trace_state"  # jax 0.7 has it in jax.core


def without_constants(closed_jaxpr: ClosedJaxpr) -> Jaxpr:
    """Return a program whose first inputs are what were its constants.

    jax 0.12 keeps the arrays in it, and a function that refers to it would keep tracers
    for longer than their trace.
    """
    jaxpr = closed_jaxpr.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def bind(eqn: JaxprEqn, args: Iterable[Any]) -> Sequence[Any]:
    """Evaluate one equation of a jaxpr, under its name and its context."""
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    # jax 0.7 keeps the functions among the parameters apart.
    functions, bind_params = (
        bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    )
    source = eqn.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    with (
        source_info_util.user_context(source.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        out = eqn.primitive.bind(*functions, *args, **bind_params)
    return out if eqn.primitive.multiple_results else [out]


def bind_while(eqn: JaxprEqn, args: Sequence[Any], proceed: jax.Array) -> Sequence[Any]:
    """Evaluate a ``while`` loop that is not entered unless ``proceed``."""
    params = eqn.params
    consts, carry = (
        args[: params["cond_nconsts"]],
        args[params["cond_nconsts"] + params["body_nconsts"] :],
    )
    condition = jax.extend.core.jaxpr_as_fun(params["cond_jaxpr"])
    cond_jaxpr = jax.make_jaxpr(
        lambda proceed, *args: jnp.logical_and(proceed, *condition(*args))
    )(proceed, *consts, *carry)
    gated = eqn.replace(
        params={
            **params,
            "cond_jaxpr": cond_jaxpr,
            "cond_nconsts": params["cond_nconsts"] + 1,
        }
    )
    return bind(gated, [proceed, *args])


def is_staging() -> bool:
    """Return whether operations become part of a program, as under ``jax.jit``.

    Eager ``jax.vmap`` and derivatives trace too, but run what they do not map.
    """
    return isinstance(_new_array(), jax.core.Tracer)


def is_in_jit() -> bool:
    """Return whether a function that is compiled as a whole is being traced.

    ``jax.lax.scan`` and the like stage too, but called eagerly they are traced anew in
    every call, and take in what the function closes over as it is then.
    """
    trace = getattr(_new_array(), "_trace", None)
    while trace is not None:
        debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(debug_info, "traced_for", None) in ("jit", "pmap", "shard_map"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_differentiated() -> bool:
    """Return whether a derivative is taken of what is computed here.

    True also where jax no longer tells. Under ``jax.jit`` and the like, derivatives
    that are taken outside of it cannot be seen.
    """
    module = jax.extend.core if hasattr(jax.extend.core, _TRACE_STATE) else jax.core
    get_state = getattr(module, _TRACE_STATE, lambda convention: None)
    reference = getattr(get_state(convention="nnx"), "_trace_ref", None)
    if reference is None:
        return True
    trace = reference()
    while trace is not None:
        if type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """Return the mapped axes along which an array differs, as far as jax tells.

    None outside of ``shard_map``, and under its ``check_vma=False``.
    """
    aval: Any = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    # jax 0.7 has the axes on the type itself.
    axes = getattr(aval, "vma", None) if kind is None else kind.varying
    if axes is None:
        # An empty set would let devices decide differently without a word.
        raise RuntimeError(
            f"jax {jax.__version__} no longer says along which mapped axes an array "
            "differs, which this version of optax_lossscale relies on. Upgrade "
            "optax_lossscale, or install an earlier jax."
        )
    return axes


def as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array as different along the mapped axes as another one is."""
    axes = tuple(varying_axes(like) - varying_axes(x))
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return getattr(jax.lax, "pvary")(x, axes)  # noqa: B009, its name until jax 0.8


def effect_names(of: Jaxpr | JaxprEqn) -> set[str]:
    return {type(effect).__name__ for effect in of.effects}


def row_major(x: Any) -> Any:
    """Return a matrix in the layout that arguments and results of a program have.

    What has fewer axes, or is no jax array, is returned as it is.
    """
    if not isinstance(x, jax.Array) or x.ndim < 2 or jax.__version_info__ < (0, 8):
        return x  # jax 0.7 cannot map a layout over the members of a `vmap`
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def zeros_like_aval(aval: Any) -> jax.Array:
    """Return zeros of an abstract type: its sharding and its mapped axes included."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.lax.full(aval.shape, 0, aval.dtype)  # where `ad` gives a float0
    return ad.zeros_like_aval(aval)


def _new_array() -> jax.Array:
    """Return an array that is traced where all operations are."""
    with jax.transfer_guard("allow"):  # the user may have forbidden it
        return jnp.zeros(())
