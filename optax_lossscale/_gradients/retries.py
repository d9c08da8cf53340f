"""Compute the gradients of an overflow again at a lower scale, and lose no step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._find import get_effective_state, replace_loss_scale_state, warn_if_constant
from .._finite import AxisName, all_finite
from .._jax_internals import as_varying, row_major, varying_axes, zeros_like_aval
from .._precision import SMALLEST_SCALE
from .._rules.arguments import check_backoff_factor
from .._validation import check_count
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
    """Create a function that repeats an overflowed backward pass at a lower scale.

    `value_and_grad` for runs in which every step is dear, as in on-policy reinforcement
    learning. Where a dynamic rule would lose the step, the gradients are computed again
    at once, on the device::

        loss, grads, opt_state = ls.value_and_grad_with_retries(loss_fn, opt_state)(
            params, batch
        )
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)

    The state that comes back is the one to pass to ``update``. ::

        value, gradients = value_and_grad(fun, state)(...)
        at most max_retries times, while the value is finite and a gradient is not:
            loss_scale *= backoff_factor
            value, gradients = value_and_grad(fun, state)(...)

    A value that is not finite is not repeated, since no scale can cure it; where
    ``update`` is given the value, it leaves the scale alone, too. Gradients that are
    still not finite after the last attempt are skipped by ``update``, as always. Every
    attempt has the same arguments, so a PRNG key gives the same numbers. Effects, such
    as ``jax.debug.print``, happen in each. Modules of Flax NNX start each attempt as
    they were before the first, and change in place as the last one has them.

    The program holds ``fun`` once, in a ``jax.lax.while_loop``. So the result can be
    differentiated in forward mode only. Call it in a compiled function: uncompiled, the
    loop is compiled in every call.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: an optimizer state with one `LossScaleState` in it, or that state.
        max_retries: how often a step is repeated at most, 0 or more.
        backoff_factor: what the scale is multiplied by before each repetition, between
            0 and 1. It does not go below 2**-126.
        axis_name: the mapped axis, or a tuple of them, over which all devices
            (``shard_map``, ``pmap``) or members (``vmap``) repeat together. It is
            needed where ``fun`` or its gradient communicates along an axis.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair. Leaves that are no arrays are those
            seen while tracing.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments, whose gradients are ``float0``.
        value_and_grad: the function that differentiates, as for `value_and_grad`.

    Returns:
        A function with the arguments of ``fun`` that returns the value, the gradients
        and the state. If anything was repeated, that state has the last scale and a
        ``growth_tracker`` of 0, so a dynamic rule waits for a whole interval before it
        grows again, and a fixed one stays there. A rule clips the scale to its
        ``min_scale`` again, so let that be low. All else in the state is as it was; the
        ratio of the two scales tells how often the step was repeated, and nothing else
        does: what `TolerantLossScale` and `check_loss_scale` count are skipped steps.
        An ``nnx.Optimizer`` is changed in place, and returned itself.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow; if ``max_retries`` or
            ``backoff_factor`` is out of range; when called, if devices would decide
            differently.
        TypeError: if ``fun`` is no function; when called, if the value is not a
            floating-point scalar.

    Warns:
        UserWarning: if the loss is float16 or the state a constant, as for
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
    get_effective_state(state)  # refuses at once what holds no loss scale
    max_retries = check_count(
        "max_retries",
        max_retries,
        "It is how often a step is repeated at most.",
        least=0,
    )
    backoff_factor = check_backoff_factor(backoff_factor)

    @functools.wraps(fun, updated=())
    def fun_with_retries(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        # An optimizer of Flax NNX may have changed since.
        scale_state = get_effective_state(state)
        warn_if_constant(scale_state)
        with copied(args, kwargs) as copies:

            def attempt(scale: jax.Array) -> tuple[jax.Array, Any, Any, Any]:
                output, grads, contents = copies.differentiate(differentiated, scale)
                value = output[0] if has_aux else output
                finite, sound = (all_finite(x, axis_name) for x in (grads, value))
                # XLA would let the loop carry matrices as their products leave them,
                # transposed, and a CPU would copy each of them behind the loop.
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
    scale: jax.Array  # of the last attempt, before the first one that of the state
    result: list[jax.Array]  # whether the last one overflowed, and what it computed


def _repeated(
    program: Staged, max_retries: int, backoff_factor: float, axis_name: AxisName | None
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Return how many attempts there were, the last one's scale, and its result.

    The program is that of one attempt. Its last input is the scale, and its first
    output tells whether it overflowed.
    """
    *inputs, first_scale = program.inputs
    variables = program.jaxpr.invars[:-1]
    known = {id(v): x for v, x in zip(variables, inputs, strict=True)}
    # Outputs that are inputs as they are, such as parameters, are not carried.
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
    # In the loop alone it would be traced twice, for the types that it carries.
    zeros = [zeros_like_aval(v.aval) for v, y in outputs if y is None]
    _check_agreement(zeros[0], first_scale, axis_name)
    start = _Carry(jnp.zeros((), jnp.int32), first_scale, zeros)
    last = jax.lax.while_loop(proceed, body, start)
    computed = iter(last.result)
    result = [next(computed) if y is None else y for y in forwarded]
    return last.attempts, last.scale, result


def _depending_on(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Return an input of which XLA takes nothing out of the loop.

    The forward pass does not depend on the scale. Outside of the loop, all that the
    backward pass needs of it would be kept as long as the loop runs.
    """
    if varying_axes(scale) - varying_axes(x):
        return x  # the barrier would make it differ from device to device, too
    return jax.lax.optimization_barrier((x, as_varying(scale, x)))[0]


def _check_agreement(
    overflowed: jax.Array, scale: jax.Array, axis_name: AxisName | None
) -> None:
    """Refuse decisions that differ between the devices of a ``shard_map``."""
    axes = varying_axes(overflowed) - varying_axes(scale)
    if axes:
        raise ValueError(
            "`axis_name` must name every mapped axis along which the loss or its "
            f"gradients differ, here {sorted(axes, key=str)}, got {axis_name!r}. Else "
            "some devices would repeat a step that others do not, and wait for them "
            "forever where `fun` communicates. Add the axis, or average the loss."
        )
