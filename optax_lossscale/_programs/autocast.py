"""Compute the products of a function in a narrower type, and nothing else."""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from .._validation import (
    advise_if_left_out,
    check_dtype,
    check_function,
    is_traced,
    warn,
)
from .loops import with_less_kept
from .origins import origins_of_arguments
from .primitives import MOVES, PRODUCTS, TRANSPARENT
from .products import VECTORS, reason_to_leave, reasons_to_leave
from .rewrite import (
    MUTABLE_ARRAYS,
    effect_names,
    eqn_like,
    evaluate,
    jaxpr_of,
    new_var,
    refuse_effects,
    remembered,
    with_calls,
    with_eqns,
    with_programs,
)
from .traced_call import Arguments, Output, TracedCall, on_traced_calls


@advise_if_left_out(
    "Write `autocast(loss_fn, jnp.float16)` and scale the loss with `value_and_grad`, "
    "or `autocast(loss_fn, jnp.bfloat16)`, which needs no scale. A decorator is "
    "`functools.partial(autocast, dtype=jnp.float16)`. It is not a context manager: "
    '`with jax.default_matmul_precision("highest"):` keeps a part in float32.'
)
def autocast(
    fun: Callable[Arguments, Output], dtype: Any
) -> Callable[Arguments, Output]:
    """Create a function that computes its matmuls and convolutions in ``dtype``.

    Everything else is computed as written.

    Use it to train a float32 program in float16, without a cast in the model::

        grad_fn = ls.value_and_grad(ls.autocast(loss_fn, jnp.float16), opt_state)
        loss, grads = grad_fn(params, batch)

    A matrix product or convolution of two float32 arrays, or of one and an array in
    ``dtype``, is computed in ``dtype``: its operands are rounded, and its result is
    converted back to float32. The products of its backward pass are cast, too, which is
    why float16 needs a loss scale. bfloat16 needs none. Sums, norms, softmax,
    exponentials, lookups and losses stay in float32.

    A product counts as a matrix product if each element of its result sums 8 numbers or
    more. These are left as they are:

    - sums of products as in ``jnp.vdot``, outer and elementwise products, and products
      that sum fewer numbers, such as rotations;
    - products of other types than float32;
    - with a ``precision`` other than the default. So the context
      ``jax.default_matmul_precision("highest")`` keeps a part of ``fun`` in float32;
    - in functions with a derivative or a batch rule of their own (``jax.custom_jvp``,
      ``jax.custom_vjp``, ``jax.custom_batching.custom_vmap``, Pallas). Put `autocast`
      inside of these, as in ``scale_backward(autocast(fun, dtype), scale)``.

    Call the result under ``jax.jit``. Outside of it, every call traces ``fun`` again.

    In a ``scan``, it computes cheap operations again in the backward pass where that
    keeps fewer bytes. JAX alone decides in a body with a ``jax.checkpoint``, a
    ``while`` loop, or an effect such as ``jax.debug.print``.

    Args:
        fun: a function of pytrees, traced as under ``jax.jit``. It must not change its
            arguments, except for Flax NNX modules, or use a ``jax.Ref`` from outside.
        dtype: the type of the products, float16 or bfloat16, or its name.

    Returns:
        A function with the arguments of ``fun``, whose results and gradients have the
        types of those of ``fun``. It can be differentiated, vectorized and compiled as
        ``fun`` can.

    Raises:
        TypeError: if an argument is left out, or ``fun`` is no function; when called,
            if it uses a ``jax.Ref``.
        ValueError: if ``dtype`` is neither float16 nor bfloat16; when called, if
            ``fun`` changes an array in its arguments.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> def loss_fn(w, x):
        ...     return jnp.sum(x @ w) + 2.0**-12
        >>> w, x = jnp.full(8, 1 + 2.0**-12), jnp.ones((3, 8))
        >>> print(loss_fn(w, x) - 24, ls.autocast(loss_fn, jnp.float16)(w, x) - 24)
        0.0061035156 0.00024414062

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 4; PyTorch,
        `torch.autocast <https://docs.pytorch.org/docs/stable/amp.html>`_
    """
    check_function("fun", fun, "It comes first: `autocast(loss_fn, jnp.float16)`.")
    name = check_dtype("dtype", dtype)
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"`dtype` must be float16 or bfloat16, got {name}. Wider types are no "
            "cast, and float8 needs a scale for each array, as in Flax's "
            "`Fp8DotGeneral`."
        )

    def run_cast(call: TracedCall) -> Sequence[jax.Array]:
        refuse_effects(effect_names(call.jaxpr) & MUTABLE_ARRAYS)
        _warn_if_nothing_is_cast(call.jaxpr, name)
        # The constants of a program are no transfers that a guard should stop.
        with jax.transfer_guard_host_to_device("allow"):
            cast = _cast(call.jaxpr, name)
            program = with_less_kept(cast, name, origins_of_arguments(call.inputs))
            if is_traced(call.inputs):
                program = with_calls(program)
            return evaluate(program, *call.inputs)

    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(fun)):
        # An Equinox module stays a tree with its arrays, so that it can be trained.
        call = on_traced_calls(lambda fun, /, *args, **kw: fun(*args, **kw), run_cast)
        return jax.tree_util.Partial(call, fun)
    return on_traced_calls(fun, run_cast)


def _warn_if_nothing_is_cast(program: Jaxpr, dtype: str) -> None:
    found = [x for x in reasons_to_leave(program, dtype) if x != VECTORS]
    advice = collections.Counter(left.advice if left else "" for left in found)
    if not advice or "" in advice:
        return  # some are cast, here or by hand
    [(most, count)] = advice.most_common(1)
    warn(
        f"`autocast` casts no matrix product or convolution of `fun`, 0 of "
        f"{advice.total()}. The reason, for {count} of them, is {most} "
        "`autocast_report` lists them."
    )


@remembered
def _cast(program: Any, dtype: str) -> Any:
    """Return a program with cast products."""
    # By identity: literals have no hash.
    used = [x for eqn in program.eqns for x in eqn.invars] + jaxpr_of(program).outvars
    uses = collections.Counter(map(id, used))
    # What has a name, perhaps after a reshape.
    named: set[int] = set()
    for eqn in reversed(program.eqns):
        name, results = eqn.primitive.name, {*map(id, eqn.outvars)}
        if name == "name" or name in MOVES and results & named:
            named |= {id(x) for x in eqn.invars if uses[id(x)] == 1}
    # The results of cast products before their conversion to float32, by those after.
    narrow: dict[int, Var] = {}

    def change(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        name = eqn.primitive.name
        if name in TRANSPARENT:
            yield with_programs(eqn, lambda inside: _cast(inside, dtype))
        elif name in PRODUCTS and reason_to_leave(eqn, dtype) is None:
            yield from _cast_product(eqn, dtype, narrow)
        elif name in MOVES and (x := id(eqn.invars[0])) in named & narrow.keys():
            # A policy of `jax.checkpoint` keeps what a `name` returns.
            yield from _converted_behind(eqn, [narrow[x]], dtype, narrow)
        else:
            yield eqn

    return with_eqns(program, change)


def _cast_product(
    eqn: JaxprEqn, dtype: str, narrow: dict[int, Var]
) -> Iterator[JaxprEqn]:
    """Yield equations that replace a product. The result has the same type."""
    operands: list[Any] = list(eqn.invars)
    for i, x in enumerate(operands[:2]):
        if x.aval.dtype == jnp.float32:
            operands[i] = new_var(x.aval, dtype)
            yield _convert(eqn, x, operands[i])
    params = {**eqn.params, "preferred_element_type": jnp.dtype(dtype)}
    eqn = eqn.replace(params=params)
    yield from _converted_behind(eqn, operands, dtype, narrow)


def _converted_behind(
    eqn: JaxprEqn, operands: list[Any], dtype: str, narrow: dict[int, Var]
) -> Iterator[JaxprEqn]:
    """Yield an equation on narrow operands, and the conversion of its result."""
    (result,) = eqn.outvars
    narrow[id(result)] = before = new_var(result.aval, dtype)
    yield eqn.replace(invars=operands, outvars=[before])
    yield _convert(eqn, before, result)


def _convert(eqn: JaxprEqn, x: Any, y: Any) -> Any:
    return eqn_like(eqn, _to(y.aval.dtype.name), [x], y)


@functools.cache
def _to(dtype: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.convert_element_type(x, dtype)
