"""Compute only the matmuls and convolutions of a function in a narrower dtype."""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from .._jax_internals import rewriting
from .._programs.places import is_of_user
from .._programs.primitives import MOVES, PRODUCTS, TRANSPARENT
from .._programs.rewrite import (
    MUTABLE_ARRAYS,
    Program,
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
from .._programs.traced_call import TracedCall, on_traced_calls
from .._validation import (
    Arguments,
    FunctionT,
    Output,
    check_dtype,
    check_function,
    check_names,
    is_traced,
    warn,
)
from .keep import with_kept
from .loops import with_less_kept
from .origins import origins_of_arguments
from .products import VECTORS, Left, reason_to_leave, reasons_to_leave


@overload
def autocast(
    fun: Callable[Arguments, Output], dtype: Any, *, keep: Sequence[str] = ()
) -> Callable[Arguments, Output]: ...
@overload
def autocast(
    *, dtype: Any, keep: Sequence[str] = ()
) -> Callable[[FunctionT], FunctionT]: ...
def autocast(fun: Any = None, dtype: Any = None, *, keep: Sequence[str] = ()) -> Any:
    """Create a function that computes its matmuls and convolutions in ``dtype``.

    Everything else is computed as written.

    Use it to train a float32 program in float16, without a cast in the model::

        grad_fn = ls.value_and_grad(ls.autocast(loss_fn, jnp.float16), opt_state)
        loss, grads = grad_fn(params, batch)

    A matmul or convolution is computed in ``dtype`` if both operands are float32, or if
    one is float32 and the other is already in ``dtype``. Its operands are rounded, and
    its result is converted back to float32. The matmuls of the backward pass are also
    cast, which is why float16 needs a loss scale. bfloat16 does not. Sums, norms,
    softmax, exponentials, lookups and losses stay in float32.

    `autocast` leaves the following as they are:

    - vector, outer and elementwise products, such as ``jnp.vdot``, and matmuls whose
      elements sum fewer than 8 numbers, such as rotations;
    - matmuls and convolutions in other dtypes than float32;
    - those that ``keep`` names, which get the highest ``precision``;
    - matmuls and convolutions with a ``precision`` other than the default;
    - functions with their own derivative or batch rule (``jax.custom_jvp``,
      ``jax.custom_vjp``, ``jax.custom_batching.custom_vmap``, Pallas). Put `autocast`
      inside these, for example ``scale_backward(autocast(fun, dtype), scale)``.

    Without ``fun``, it returns a decorator: ``@autocast(dtype=jnp.float16)``.

    Call the result under ``jax.jit``. Otherwise, every call traces ``fun`` again.

    In a ``scan``, the backward pass computes cheap operations again if this saves
    memory. If the body contains a ``jax.checkpoint``, a ``while`` loop, or an effect
    such as ``jax.debug.print``, `autocast` leaves this choice to JAX.

    Args:
        fun: a function of pytrees, traced as under ``jax.jit``. It must not change its
            arguments, except for Flax NNX modules, or use a ``jax.Ref`` from outside.
        dtype: the dtype of the matmuls and convolutions: float16, bfloat16, or the name
            of one of these.
        keep: names of matmuls and convolutions that stay in float32, forward and
            backward, as `autocast_report` shows them: parts of the path of a parameter
            or of a scope, such as "router" or ``"blocks/*/mlp"``, or a line, such as
            "model.py:12". A star stands for any text within a part.

    Returns:
        A function with the arguments of ``fun``. Its results and gradients have the
        same dtypes as without `autocast`. It can be differentiated, vectorized and
        compiled like ``fun``.

    Raises:
        TypeError: if ``dtype`` is left out, or ``fun`` is not a function; when
            called, if ``fun`` uses a ``jax.Ref``.
        ValueError: if ``dtype`` is not float16 or bfloat16; when called, if ``fun``
            changes an array in its arguments, or if a name in ``keep`` is neither of a
            float32 matmul nor of an array in the arguments.

    Warns:
        UserWarning: when called, if ``fun`` has matmuls or convolutions, but none of
            them is cast, by `autocast` or by hand.

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
    if dtype is None:
        raise TypeError(
            "`dtype` must be given, got None. Write `autocast(loss_fn, jnp.float16)` "
            "and scale the loss with `value_and_grad`, or `autocast(loss_fn, "
            "jnp.bfloat16)`, which needs no scale. It is not a context manager: "
            '`with jax.default_matmul_precision("highest"):` keeps a part in float32.'
        )
    if fun is None:
        return functools.partial(autocast, dtype=dtype, keep=keep)
    check_function("fun", fun, "It comes first: `autocast(loss_fn, jnp.float16)`.")
    check_names("keep", keep, "A row of `autocast_report` has its `name`.")
    name = check_dtype("dtype", dtype)
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"`dtype` must be float16 or bfloat16, got {name}. A wider dtype "
            "casts nothing, and float8 needs a scale for each array: see Flax's "
            "`Fp8DotGeneral`."
        )

    def run_cast(call: TracedCall) -> Sequence[jax.Array]:
        refuse_effects(call.effects & MUTABLE_ARRAYS)
        with rewriting():
            left = [*reasons_to_leave(call.jaxpr, name)]
        _warn_if_nothing_is_cast(left)
        # The constants of a program are no transfers that a guard should stop.
        with jax.transfer_guard_host_to_device("allow"):
            program = with_kept(call, keep) if keep else call.jaxpr
            with rewriting():
                cast = _cast(program, name)
                program = with_less_kept(cast, name, origins_of_arguments(call.inputs))
                if is_traced(call.inputs) and not _is_debugging():
                    program = with_calls(program)
            return evaluate(program, *call.inputs)

    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(fun)):
        # An Equinox module stays a tree with its arrays, so that it can be trained.
        call = on_traced_calls(lambda fun, /, *args, **kw: fun(*args, **kw), run_cast)
        return jax.tree_util.Partial(call, fun)
    return on_traced_calls(fun, run_cast)


def _is_debugging() -> bool:
    """Return whether JAX runs each operation by itself, to name one in an error."""
    flags = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
    return any(getattr(jax.config, flag) for flag in flags)


def _warn_if_nothing_is_cast(products: Sequence[tuple[JaxprEqn, Left | None]]) -> None:
    found = [(eqn, left) for eqn, left in products if left != VECTORS]
    if not all(left and left.advice for _, left in found):
        return  # some are cast, here or by hand
    found.sort(key=lambda x: not is_of_user(x[0]))
    advice = collections.Counter(left.advice for _, left in found if left)
    reasons = [f"The reason, for {n} of them, is {x}" for x, n in advice.items()]
    if reasons:
        warn(
            f"`autocast` casts no matmul or convolution of `fun`, 0 of {len(found)}. "
            f"{' '.join(reasons)} `autocast_report` lists them."
        )


@remembered
def _cast(program: Program, dtype: str) -> Any:
    """Return a program with cast products, which ``products.py`` defines."""
    named = _used_by_a_name(program)
    # The results of cast products before their conversion to float32, by those after.
    narrow: dict[int, Var] = {}

    def change(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        name = eqn.primitive.name
        if name in TRANSPARENT:
            yield with_programs(eqn, lambda inside: _cast(inside, dtype))
        elif name in PRODUCTS and reason_to_leave(eqn, dtype) is None:
            yield from _cast_product(eqn, dtype, narrow)
        elif name in MOVES and (x := id(eqn.invars[0])) in named & narrow.keys():
            # A policy of `jax.checkpoint` keeps the result of a `name`.
            yield from _converted_behind(eqn, [narrow[x]], dtype, narrow)
        else:
            yield eqn

    return with_eqns(program, change)


def _used_by_a_name(program: Program) -> set[int]:
    """Return the variables that only a ``name`` uses, perhaps after a reshape.

    They are returned by identity, because literals have no hash.
    """
    used = [x for eqn in program.eqns for x in eqn.invars] + jaxpr_of(program).outvars
    uses = collections.Counter(map(id, used))
    named: set[int] = set()
    for eqn in reversed(program.eqns):
        name, results = eqn.primitive.name, {*map(id, eqn.outvars)}
        if name == "name" or name in MOVES and results & named:
            named |= {id(x) for x in eqn.invars if uses[id(x)] == 1}
    return named


def _cast_product(
    eqn: JaxprEqn, dtype: str, narrow: dict[int, Var]
) -> Iterator[JaxprEqn]:
    """Yield equations that replace a product. The result has the same dtype."""
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
