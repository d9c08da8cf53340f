"""Compute gradients that overflow again at a lower scale, instead of skipping."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._axes import AxisName, check_agreement
from .._dtypes import SMALLEST_SCALE
from .._find import replace_loss_scale_state
from .._finite import all_finite
from .._flax_internals.nnx_objects import update_objects
from .._jax_internals import after, zeros_like_aval
from .._programs.rewrite import (
    MUTABLE_ARRAYS,
    check_axes,
    evaluate_with_nan,
    refuse_effects,
)
from .._programs.traced_call import traced_call
from .._rules.fields import check_field
from .._validation import Arguments, Output, check_count
from .notes import Note, note_divided, using_scale
from .value_and_grad import advise_on_state, differentiate


@advise_on_state
def value_and_grad_with_retries(
    fun: Callable[Arguments, Output],
    state: Any,
    *,
    max_retries: int = 4,
    backoff_factor: float = 0.5,
    axis_name: AxisName | None = None,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    value_and_grad: Callable[..., Any] | None = None,
) -> Callable[Arguments, tuple[Output, Any, Any]]:
    """Create a function that retries at a lower loss scale if the gradients overflow.

    Use it instead of `value_and_grad` if every step is expensive, such as in on-policy
    reinforcement learning: an overflow then costs time, but the step is applied. The
    function does this on the device::

        value, gradients = value_and_grad(fun, state)(...)
        at most max_retries times, while the value is finite and a gradient is not:
            loss_scale *= backoff_factor
            value, gradients = value_and_grad(fun, state)(...)

    Call it inside a compiled function, and pass the state that it returns to
    ``update``. The program contains ``fun`` once, in a ``jax.lax.while_loop``, so it
    cannot be differentiated in reverse mode.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: the state, as for `value_and_grad`.
        max_retries: how many times a step may be retried, 0 or more.
        backoff_factor: the factor that lowers the scale before each retry, in (0, 1).
        axis_name: the mapped axis, or a tuple of axes, along which all devices retry
            together. It is needed if ``fun`` or its gradient communicates along an
            axis.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments.
        value_and_grad: the function that differentiates, as for `value_and_grad`.

    Returns:
        A function with the arguments of ``fun`` that returns the value, the gradients
        and the state. After a retry, the state has the last scale and a
        ``growth_tracker`` of 0. An ``nnx.Optimizer`` changes in place.

    Raises:
        ValueError: as `value_and_grad`; if ``max_retries`` or ``backoff_factor`` is out
            of range; when called, if devices would decide differently.
        TypeError: as `value_and_grad`; when called, if ``fun`` uses a ``jax.Ref`` from
            outside, or ``state`` is not a pytree.

    Warns:
        UserWarning: as `value_and_grad`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> def loss_fn(w):  # overflows at the first scale, 2**15
        ...     return 8.0 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> fun = ls.value_and_grad_with_retries(loss_fn, ls.DynamicLossScale().init())
        >>> loss, grads, state = fun(jnp.ones(1))
        >>> print(grads, ls.get_loss_scale(state))
        [8.] 4096.0
    """
    options = dict(argnums=argnums, holomorphic=holomorphic, allow_int=allow_int)
    at_scale = differentiate(fun, has_aux, value_and_grad, **options)
    advice = "It is the maximum number of retries per step."
    max_retries = check_count("max_retries", max_retries, advice, least=0)
    backoff_factor = check_field("backoff_factor", backoff_factor)

    @functools.wraps(fun, updated=())
    def fun_with_retries(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        def attempt(
            scale: jax.Array, /, *args: Any, **kwargs: Any
        ) -> tuple[jax.Array, Any, Any]:
            output, grads = at_scale(scale, *args, **kwargs)
            value = output[0] if has_aux else output
            is_finite = functools.partial(all_finite, axis_name=axis_name)
            grads_finite, value_finite = is_finite(grads), is_finite(value)
            return value_finite & ~grads_finite, output, grads

        # Read the state now: a Flax NNX optimizer changes in place.
        with (
            using_scale(state, Note.SCALES, Note.DIVIDES) as used,
            traced_call(attempt, args, kwargs, [used.state.loss_scale]) as call,
        ):
            check_axes(call.jaxpr, axis_name)
            refuse_effects(call.effects & MUTABLE_ARRAYS)
            attempts, scale, *outputs = _retry(
                call.jaxpr, call.inputs, max_retries, backoff_factor, axis_name
            )
            _, output, grads = call.put_back(outputs)
        note_divided(grads, used._replace(is_retried=max_retries > 0))
        tracker = jnp.where(attempts > 1, 0, used.state.growth_tracker)
        new = used.state._replace(loss_scale=scale, growth_tracker=tracker)
        new_state = update_objects(state, replace_loss_scale_state(state, new))
        return output, grads, new_state

    return fun_with_retries


class _Carry(NamedTuple):
    attempts: jax.Array
    scale: jax.Array  # of the last attempt; before the first, the scale of the state
    result: Sequence[jax.Array]  # whether the last attempt overflowed, and its outputs


def _retry(
    jaxpr: Jaxpr,
    inputs: Sequence[jax.Array],
    max_retries: int,
    backoff_factor: float,
    axis_name: AxisName | None,
) -> Sequence[jax.Array]:
    """Repeat a program, whose first input is the scale, while its first output is True.

    Return the number of attempts, and the scale and the outputs of the last one.
    """
    first_scale, *others = inputs

    def proceed(carry: _Carry) -> jax.Array:
        return carry.result[0] & (carry.attempts <= max_retries)

    def body(carry: _Carry) -> _Carry:
        lowered = jnp.maximum(carry.scale * backoff_factor, SMALLEST_SCALE)
        scale = jnp.where(carry.attempts == 0, carry.scale, lowered)
        # The forward pass does not depend on the scale. If XLA moved it out of the
        # loop, its residuals would stay in memory while the loop runs.
        barred = [after(x, scale) for x in others]
        result = evaluate_with_nan(jaxpr, scale, *barred)
        return _Carry(carry.attempts + 1, scale, result)

    # The carry gets its types from the program, so that `fun` is traced only once.
    overflowed, *zeros = [zeros_like_aval(x.aval) for x in jaxpr.outvars]
    check_agreement(overflowed, first_scale, axis_name)
    # The first attempt runs because the flag is True.
    start = _Carry(jnp.zeros((), jnp.int32), first_scale, [~overflowed, *zeros])
    last = jax.lax.while_loop(proceed, body, start)
    return [last.attempts, last.scale, *last.result]
