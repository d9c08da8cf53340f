"""Differentiate a loss with loss scaling."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._find import get_effective_state, scale_state_in_use
from .at_scale import at_scale, warn_of_narrow_loss
from .scaled_losses import note_scaled


def value_and_grad(
    fun: Callable[..., Any],
    state: Any,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any]]:
    """Create a function that evaluates a loss and its gradients with loss scaling.

    Use it instead of ``jax.value_and_grad`` if the loss is computed in float16, where
    small gradients underflow. The gradients are multiplied by the loss scale during the
    backward pass, and divided by it afterward. The value is never multiplied.

    Call it inside the compiled function, with the state that is passed to that
    function. The scale of a state from outside never changes.

    Args:
        fun: a function that returns the loss, or (loss, aux) if ``has_aux`` is True.
        state: an optimizer state that contains one `LossScaleState`, or that state
            itself. Pass the same state to the optimizer's ``update``.
        argnums: which positional arguments to differentiate, or an ``nnx.DiffState``.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments. Their gradients are ``float0``.
        value_and_grad: the function that differentiates, such as
            ``flax.nnx.value_and_grad`` or ``equinox.filter_value_and_grad``.

    Returns:
        A function with the arguments of ``fun`` that returns the value and the true
        gradients. They have the types of the parameters, but float32 where that is
        float16 or float8. Where they overflowed, they are still NaN or inf.

    Raises:
        ValueError: as `get_loss_scale_state`, or if a wrapper that belongs inside
            `with_loss_scaling`, such as ``optax.MultiSteps``, is around it.
        TypeError: if ``fun`` is not a function that returns a floating-point scalar;
            when called, if ``jax.value_and_grad`` is given an ``nnx.Module``.

    Warns:
        UserWarning: if the loss is float16, in which a scale above 65504 is infinite;
            if ``state`` is a constant of a compiled function but its rule changes; or
            if moments of a chained optimizer are outside `with_loss_scaling`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> def loss_fn(w):  # `jax.grad` returns 0
        ...     return 2.0**-30 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> state = ls.DynamicLossScale().init()
        >>> value, grads = ls.value_and_grad(loss_fn, state)(jnp.ones(2))
        >>> print(grads * 2.0**30)
        [1. 1.]
    """
    get_effective_state(state)  # raises now if there is no loss scale
    options = dict(argnums=argnums, holomorphic=holomorphic, allow_int=allow_int)
    differentiated = at_scale(fun, has_aux, value_and_grad, options)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # A Flax NNX optimizer may have changed since.
        scale = scale_state_in_use(state).loss_scale
        note_scaled(state, "value_and_grad")
        output, grads = differentiated(scale, args, kwargs)
        warn_of_narrow_loss(output[0] if has_aux else output)
        return output, grads

    return value_and_grad_fun


_value_and_grad = value_and_grad  # `grad` has an argument of this name


def grad(
    fun: Callable[..., Any],
    state: Any,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Create a function that evaluates the gradients of a loss with loss scaling.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: the state, as for `value_and_grad`.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments.
        value_and_grad: the function that differentiates, as for `value_and_grad`.

    Returns:
        A function that returns the gradients, or (gradients, aux) if ``has_aux``.

    Raises:
        ValueError, TypeError: as `value_and_grad`.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.grad(lambda w: w**2, ls.DynamicLossScale().init())(3.0)
        Array(6., dtype=float32)
    """
    options = dict(argnums=argnums, holomorphic=holomorphic, allow_int=allow_int)
    differentiated = _value_and_grad(
        fun, state, has_aux=has_aux, value_and_grad=value_and_grad, **options
    )

    @functools.wraps(fun, updated=())
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiated(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun
