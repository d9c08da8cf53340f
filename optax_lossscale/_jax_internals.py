"""Uses of jax internals. Only this file handles differences between jax versions.

`with_loss_scaling`, `skip_nonfinite`, `value_and_grad` and `scale_loss` need only what
is above `rewriting`. Everything else here is for rewriting programs.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# The oldest and the newest jax that this version is tested with.
TESTED = "0.7.0", "0.12.0"


def is_staging() -> bool:
    """Return whether operations are staged into a program, as under ``jax.jit``.

    Eager ``jax.vmap`` and derivatives also trace, but only operations on mapped or
    differentiated arrays.
    """
    with jax.transfer_guard("allow"):  # the user may have forbidden it
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """Return the mapped axes along which an array varies, as far as jax knows.

    There are none outside ``shard_map``, or with its ``check_vma=False``.
    """
    aval: Any = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    # In jax 0.7, the type itself has the axes.
    axes = getattr(kind, "varying", getattr(aval, "vma", None))
    if axes is None and jax.sharding.get_abstract_mesh().manual_axes:
        # An empty set would let devices decide differently, without an error.
        raise RuntimeError(
            f"jax {jax.__version__} no longer reports along which mapped axes an array "
            "varies. This version of optax_lossscale relies on that. Upgrade "
            "optax_lossscale, or install an earlier jax."
        )
    return axes or frozenset()


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Mark an array as varying along the mapped axes along which another varies."""
    axes = tuple(varying_axes(like) - varying_axes(x))
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return getattr(jax.lax, "pvary")(x, axes)  # noqa: B009, its name until jax 0.8


def after(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``x`` behind a barrier: XLA uses it only after computing ``other``."""
    if varying_axes(other) - varying_axes(x):
        return x  # behind the barrier, it would also vary along these axes
    return jax.lax.optimization_barrier((x, varying_like(other, x)))[0]


def in_memory_of(x: jax.Array, other: Any) -> jax.Array:
    """Return ``x`` in the memory that holds another array: host or device."""
    # jax 0.7.0 has no spaces of memory.
    here, there = (getattr(jax.typeof(a), "memory_space", None) for a in (x, other))
    return x if here == there else jax.device_put(x, there)


def has_plain_type(x: jax.Array) -> bool:
    """Return whether the type of an array has no sharding, memory or mapped axes."""
    aval: Any = jax.typeof(x)
    return bool(aval.update(weak_type=False) == jax.core.ShapedArray(x.shape, x.dtype))


def is_ref(x: jax.Array) -> bool:
    """Return whether an array is mutable, a ``jax.Ref``."""
    return hasattr(jax.typeof(x), "inner_aval")


def unknown_jax(error: Exception) -> str:
    """Return the sentences that explain an error in the rewriting of programs."""
    from . import __version__

    oldest, newest = TESTED
    return (
        f"optax_lossscale {__version__} cannot rewrite the programs of jax "
        f"{jax.__version__} ({error!r}). It is tested with jax {oldest} to {newest}."
    )


@contextlib.contextmanager
def rewriting() -> Iterator[None]:
    """Explain errors in the rewriting of programs, during which no user's code runs.

    What programs are made of is no public part of jax, so a new version may change it.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"{unknown_jax(error)} Upgrade optax_lossscale, or install one of these "
            "versions of jax. `with_loss_scaling`, `skip_nonfinite`, `value_and_grad`, "
            "`scale_loss` and `unscale_grads` still work without it. "
            "Instead of `autocast`, cast by hand."
        ) from error


def unavailable(error: Exception) -> Any:
    """Return what takes the place of functions that could not be imported."""

    def function(*args: Any, **kwargs: Any) -> Any:
        with rewriting():
            raise error

    return function


def is_computed(x: Any) -> bool:
    """Return whether the function that is being traced has computed an array."""
    return any(getattr(y, "parent", None) is not None for y in _wrapped(x))


def is_differentiated(x: Any) -> bool:
    """Return whether an array is being differentiated, as far as it shows here."""
    return any(hasattr(y, "tangent") for y in _wrapped(x))


def _wrapped(x: Any) -> Iterator[Any]:
    """Yield a traced array, and those in it.

    Derivatives and `jax.vmap` wrap the arrays that they trace, perhaps each other.
    """
    while isinstance(x, jax.core.Tracer):
        yield x
        x = getattr(x, "primal", getattr(x, "val", None))


def operands(x: Any, *names: str) -> Sequence[Any]:
    """Return the inputs of the equation of a traced array, if it has such a name.

    An empty list if the array has no equation, or if it is that of another operation.
    """
    eqn = getattr(x, "parent", None)
    is_named = getattr(getattr(eqn, "primitive", None), "name", "") in names
    return getattr(eqn, "in_tracers", []) if is_named else []


def clipped_operands(x: Any) -> Sequence[Any]:
    """Return the inputs of the equation of a traced array, if it makes inf finite.

    A function of a user may be named ``clip`` and divide by a norm, which keeps NaN.
    """
    params = getattr(getattr(x, "parent", None), "params", {})
    inside = getattr(params.get("jaxpr"), "eqns", ())
    names = {eqn.primitive.name for eqn in inside}
    cheap = {"convert_element_type", "broadcast_in_dim"}
    is_clip = params.get("name") == "nan_to_num" or names - cheap == {"max", "min"}
    return operands(x, "jit") if is_clip else operands(x, "clamp")


def inputs_of_scan(params: dict[str, Any], inputs: Sequence[Any]) -> list[list[Any]]:
    """Split the inputs of a ``scan``: constants, the carry, the scanned arrays."""
    if "num_consts" in params:
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        return [[*inputs[:first]], [*inputs[first:last]], [*inputs[last:]]]
    return [[*x] for x in params["ft_in"].update(inputs).unpack()]  # since jax 0.12


def inside_of_shard_map(params: dict[str, Any], fun: Callable[[], Any]) -> Any:
    """Call a function where the mapped axes of a ``shard_map`` are bound."""
    result = None

    def call() -> tuple[()]:
        nonlocal result
        result = fun()
        return ()

    axes = params.get("newly_manual_axes")  # `manual_axes` until jax 0.7
    mapped = jax.shard_map(
        call,
        mesh=params["mesh"],
        in_specs=(),
        out_specs=(),
        axis_names=params["manual_axes"] if axes is None else axes,
        check_vma=params["check_vma"],
    )
    jax.make_jaxpr(mapped)()
    return result


def no_tangent(zeros: jax.Array) -> Any:
    """Return a value that a rule of a ``custom_jvp`` may return instead of zeros."""
    return jax.custom_derivatives.SymbolicZero(jax.typeof(zeros))


def zeros_like_aval(aval: Any) -> jax.Array:
    """Return zeros of an abstract type, with its sharding and its mapped axes."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.lax.full(aval.shape, 0, aval.dtype)  # `ad` would return float0
    return jax.interpreters.ad.zeros_like_aval(aval)


def like(program: Any, jaxpr: Any) -> Any:
    """Return a program of the same class, with the same constants."""
    # Since jax 0.12 there is one class, whose attribute ``jaxpr`` is the object itself.
    if getattr(program, "jaxpr", program) is program:
        return jaxpr
    return type(program)(jaxpr, program.consts)


def inlined() -> Any:
    """Return the ``inline`` of a call that a trace replaces by its operations."""
    return jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # from jax 0.12
