"""Compute overflowed gradients again at a lower scale, instead of skipping a step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._find import get_effective_state, replace_loss_scale_state, warn_if_constant
from .._finite import all_finite
from .._jax_internals import as_varying, row_major, varying_axes, zeros_like_aval
from .._precision import SMALLEST_SCALE
from .._validation import AxisName, check
from .at_scale import at_scale, warn_of_narrow_loss
from .checks import check_axes
from .in_place import copied, update_objects
from .staged import Staged, evaluate, staged


def value_and_grad_with_retries(
    fun: Callable[..., Any],
    state: Any,
    *,
    max_retries: int = 4,
    backoff_factor: float = 0.5,
    axis_name: AxisName | None = None,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Create a function that computes overflowed gradients again at a lower scale.

    Use it instead of `value_and_grad` if every step is expensive, as in on-policy
    reinforcement learning. A dynamic rule skips a step that overflows. This function
    computes its gradients again at once, on the device, and returns the state to pass
    to ``update``::

        loss, grads, opt_state = ls.value_and_grad_with_retries(loss_fn, opt_state)(
            params, batch
        )
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)

    The function does the following::

        value, gradients = value_and_grad(fun, state)(...)
        at most max_retries times, while the value is finite and a gradient is not:
            loss_scale *= backoff_factor
            value, gradients = value_and_grad(fun, state)(...)

    A non-finite value is not retried, because no scale can cure it. If you pass
    the value to ``update``, it does not change the scale either. If gradients are still
    non-finite after the last attempt, ``update`` skips the step as usual.

    Every attempt gets the same arguments, so a PRNG key gives the same numbers. Effects
    such as ``jax.debug.print`` happen in every attempt. Flax NNX modules start each
    attempt as they were before the first, and end as the last attempt left them.

    After a retry, the state has the last scale and a ``growth_tracker`` of 0; nothing
    else in it changes. A dynamic rule then waits a whole interval before it grows, and
    a fixed rule keeps the lower scale. ``update`` clips the scale to the ``min_scale``
    of the rule, so choose a low one. Only the ratio of the two scales tells how often
    the step was retried: `TolerantLossScale` and `check_loss_scale` count skipped
    steps.

    Call it inside a compiled function. Uncompiled, the loop is compiled in every call.
    The program contains ``fun`` once, in a ``jax.lax.while_loop``, so the result can
    only be differentiated in forward mode.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: an optimizer state that contains one `LossScaleState`, or that state
            itself.
        max_retries: how many times a step may be retried, 0 or more.
        backoff_factor: the factor that lowers the scale before each retry, between 0
            and 1. The scale does not fall below 2**-126.
        axis_name: the mapped axis, or a tuple of them, along which all devices
            (``shard_map``, ``pmap``) or members (``vmap``) retry together. It is needed
            if ``fun`` or its gradient communicates along an axis.
        argnums: which positional arguments to differentiate, as for `value_and_grad`.
        has_aux: whether ``fun`` returns a pair. Leaves that are not arrays are returned
            as they were while tracing.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments. Their gradients are ``float0``.
        value_and_grad: the function that differentiates, as for `value_and_grad`.

    Returns:
        A function with the arguments of ``fun`` that returns the value, the gradients
        and the state. An ``nnx.Optimizer`` is changed in place and returned.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one, or if a
            wrapper that belongs inside `with_loss_scaling`, such as
            ``optax.MultiSteps``, is around it; if ``max_retries`` or ``backoff_factor``
            is out of range; when called, if devices would decide differently.
        TypeError: if ``fun`` is not a function; when called, if the value is not a
            floating-point scalar.

    Warns:
        UserWarning: if the loss is float16 or the state is a constant, as for
            `value_and_grad`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> state = ls.DynamicLossScale(init_scale=2.0**15).init()
        >>> def loss_fn(w):
        ...     return 8.0 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> ls.grad(loss_fn, state)(jnp.ones(1))
        Array([inf], dtype=float32)
        >>> fun = ls.value_and_grad_with_retries(loss_fn, state)
        >>> loss, grads, state = fun(jnp.ones(1))
        >>> print(grads, ls.get_loss_scale(state))
        [8.] 4096.0
    """
    differentiated = at_scale(
        fun,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        value_and_grad=value_and_grad,
    )
    get_effective_state(state)  # raises now if there is no loss scale
    max_retries = check("max_retries", max_retries)
    backoff_factor = check("backoff_factor", backoff_factor)

    @functools.wraps(fun, updated=())
    def fun_with_retries(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        # A Flax NNX optimizer may have changed since.
        scale_state = get_effective_state(state)
        warn_if_constant(scale_state)
        with copied(args, kwargs) as copies:

            def attempt(scale: jax.Array) -> tuple[jax.Array, Any, Any, Any]:
                output, grads, contents = copies.differentiate(differentiated, scale)
                value = output[0] if has_aux else output
                finite, sound = (all_finite(x, axis_name) for x in (grads, value))
                # Otherwise XLA may carry matrices transposed, as matmuls leave them,
                # and a CPU then copies each of them after the loop.
                grads = jax.tree.map(row_major, grads)
                return sound & ~finite, output, grads, contents

            program = staged(attempt, jnp.asarray(scale_state.loss_scale))
            check_axes(program.jaxpr, axis_name)
            attempts, scale, result = _repeated(
                program, max_retries, backoff_factor, axis_name
            )
            _, output, grads, contents = program.put_back(result)
            output = copies.update(output, contents)
        warn_of_narrow_loss(output[0] if has_aux else output)
        tracker = jnp.where(attempts > 1, 0, scale_state.growth_tracker)
        new = scale_state._replace(loss_scale=scale, growth_tracker=tracker)
        new_state = update_objects(state, replace_loss_scale_state(state, new))
        return output, grads, new_state

    return fun_with_retries


class _Carry(NamedTuple):
    attempts: jax.Array
    scale: jax.Array  # of the last attempt; before the first, that of the state
    result: list[jax.Array]  # whether the last attempt overflowed, and its outputs


def _repeated(
    program: Staged, max_retries: int, backoff_factor: float, axis_name: AxisName | None
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Return the number of attempts, and the scale and the result of the last one.

    The program is one attempt. Its last input is the scale, and its first output tells
    whether the attempt overflowed.
    """
    *inputs, first_scale = program.inputs
    variables = program.jaxpr.invars[:-1]
    known = {id(v): x for v, x in zip(variables, inputs, strict=True)}
    # Outputs that are unchanged inputs, such as parameters, are not carried.
    forwarded = [known.get(id(v)) for v in program.jaxpr.outvars]

    def proceed(carry: _Carry) -> jax.Array:
        may_repeat = carry.result[0] & (carry.attempts <= max_retries)
        return (carry.attempts == 0) | may_repeat

    def body(carry: _Carry) -> _Carry:
        lowered = jnp.maximum(carry.scale * backoff_factor, SMALLEST_SCALE)
        scale = jnp.where(carry.attempts == 0, carry.scale, lowered)
        barred = [_depending_on(scale, x) for x in inputs]
        result = evaluate(program.jaxpr, *barred, scale)
        computed = [x for x, y in zip(result, forwarded, strict=True) if y is None]
        return _Carry(carry.attempts + 1, scale, computed)

    outputs = zip(program.jaxpr.outvars, forwarded, strict=True)
    # The carry gets its types from the program, so that `fun` is traced only once.
    zeros = [zeros_like_aval(v.aval) for v, y in outputs if y is None]
    _check_agreement(zeros[0], first_scale, axis_name)
    start = _Carry(jnp.zeros((), jnp.int32), first_scale, zeros)
    last = jax.lax.while_loop(proceed, body, start)
    computed = iter(last.result)
    result = [next(computed) if y is None else y for y in forwarded]
    return last.attempts, last.scale, result


def _depending_on(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Return an input from which XLA cannot hoist anything out of the loop.

    The forward pass does not depend on the scale. If XLA hoisted it, all its residuals
    would stay in memory while the loop runs.
    """
    if varying_axes(scale) - varying_axes(x):
        return x  # the barrier would make it vary from device to device, too
    return jax.lax.optimization_barrier((x, as_varying(scale, x)))[0]


def _check_agreement(
    overflowed: jax.Array, scale: jax.Array, axis_name: AxisName | None
) -> None:
    """Raise if the devices of a ``shard_map`` could decide differently."""
    axes = varying_axes(overflowed) - varying_axes(scale)
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis along which the loss or its "
            f"gradients differ, here {sorted(axes, key=str)}, got {axis_name!r}. "
            "Otherwise some devices retry a step that others do not, and wait for them "
            "forever if `fun` communicates. Add the axis, or average the loss."
        )
