"""Differentiate a loss with loss scaling."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._find import get_effective_state, warn_if_constant
from .at_scale import at_scale, warn_of_narrow_loss


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
    small gradients underflow. The backward pass runs on gradients that are multiplied
    by the loss scale. The results are divided by it, so you get true gradients.

    The value is what ``fun`` returned. It is never multiplied by the scale, so a large
    loss is reported as it is.

    If you compile the step, pass the state to the compiled function and call
    `value_and_grad` inside it. A state from outside is a constant of the program, so
    its scale never changes.

    Args:
        fun: the loss, a function that returns a scalar, or a pair of a scalar and
            anything if ``has_aux`` is True.
        state: an optimizer state that contains one `LossScaleState`, or that state
            itself. Pass the same state to the optimizer's ``update``.
        argnums: which positional arguments to differentiate. It may be anything that
            ``value_and_grad`` takes, such as an ``nnx.DiffState``.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments. Their gradients are ``float0``.
        value_and_grad: the function that differentiates: ``jax.value_and_grad`` or one
            that returns the same, such as ``flax.nnx.value_and_grad`` or
            ``equinox.filter_value_and_grad``. It is called with ``has_aux=True``, and
            with ``argnums``, ``holomorphic`` and ``allow_int`` if they differ from
            their defaults.

    Returns:
        A function with the arguments of ``fun`` that returns the value and the
        gradients. Gradients that overflowed are still NaN or inf. Gradients in float16,
        bfloat16 and float8 are returned in float32, others in their own type.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one, or if a
            wrapper that belongs inside `with_loss_scaling`, such as
            ``optax.MultiSteps``, is around it.
        TypeError: if ``fun`` or ``value_and_grad`` is not a function; when called, if
            the value is not a floating-point scalar, or if ``value_and_grad`` does not
            return what ``jax.value_and_grad`` returns.

    Warns:
        UserWarning: if the loss is float16, because a scale above 65504 is infinite in
            that type (return the loss in float32); or if ``state`` is a constant of a
            function compiled by ``jax.jit`` and does not belong to a `FixedLossScale`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> def loss_fn(w, x):
        ...     prediction = w.astype(jnp.float16) * x
        ...     return 1e-5 * jnp.mean(prediction.astype(jnp.float32))
        >>> w, x = jnp.ones(8), jnp.full(8, 1e-3, jnp.float16)
        >>> print(jax.grad(loss_fn)(w, x).max())
        0.0
        >>> opt_state = ls.with_loss_scaling(optax.sgd(0.1)).init(w)
        >>> value, grads = ls.value_and_grad(loss_fn, opt_state)(w, x)
        >>> print(f"{grads.max():.3g}")
        1.25e-09

        For a Flax NNX or Equinox model, pass the function that differentiates it::

            fun = ls.value_and_grad(
                loss_fn, optimizer, value_and_grad=nnx.value_and_grad
            )
            loss, grads = fun(model, x, y)

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """
    get_effective_state(state)  # raises now if there is no loss scale
    differentiated = at_scale(
        fun,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        value_and_grad=value_and_grad,
    )

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # A Flax NNX optimizer may have changed since.
        scale_state = get_effective_state(state)
        warn_if_constant(scale_state)
        output, grads = differentiated(scale_state.loss_scale, args, kwargs)
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

    It is to `value_and_grad` what ``jax.grad`` is to ``jax.value_and_grad``.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: an optimizer state that contains one `LossScaleState`, or that state
            itself.
        argnums: which positional arguments to differentiate, as for `value_and_grad`.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments. Their gradients are ``float0``.
        value_and_grad: the function that differentiates, as for `value_and_grad`.

    Returns:
        A function with the arguments of ``fun`` that returns the gradients, or a pair
        of the gradients and the auxiliary output if ``has_aux`` is True.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one, or if a
            wrapper that belongs inside `with_loss_scaling`, such as
            ``optax.MultiSteps``, is around it.
        TypeError: if ``fun`` or ``value_and_grad`` is not a function; when called, if
            the value is not a floating-point scalar.

    Warns:
        UserWarning: if the loss is float16 or the state is a constant, as for
            `value_and_grad`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> opt_state = ls.with_loss_scaling(optax.sgd(0.1)).init(jnp.float32(3.0))
        >>> ls.grad(lambda w: w**2, opt_state)(3.0)
        Array(6., dtype=float32)
    """
    differentiated = _value_and_grad(
        fun,
        state,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        value_and_grad=value_and_grad,
    )

    @functools.wraps(fun, updated=())
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiated(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun
