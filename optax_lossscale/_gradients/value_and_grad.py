"""Differentiate a loss in low precision without losing its gradients."""

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
    """Create a function that returns a loss and its true gradients.

    ``jax.value_and_grad`` with a loss scale between: the backward pass runs on
    gradients multiplied by the scale, what comes out of it is divided again. The
    value is what ``fun`` returned; it is never multiplied, so a large loss is
    reported as it is.

    Args:
        fun: the loss, a function that returns a scalar, or with ``has_aux`` a pair
            of a scalar and anything.
        state: an optimizer state with one `LossScaleState` in it, or that state. It
            must be the state that is then passed to the optimizer's ``update``. Where
            the result is compiled, take the state as an argument of the compiled
            function and call `value_and_grad` inside of it: a state from outside is a
            constant of the program, and its scale never moves.
        argnums: which positional arguments to differentiate; whatever
            ``value_and_grad`` takes for it, such as an ``nnx.DiffState``.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments, whose gradients are ``float0``.
        value_and_grad: the function that differentiates: ``jax.value_and_grad``, or one
            with its results, such as ``flax.nnx.value_and_grad`` or
            ``equinox.filter_value_and_grad``. It is called with ``has_aux=True`` and
            those of the arguments above that are not left at their defaults.

    Returns:
        A function with the arguments of ``fun`` that returns the value and the
        gradients, still NaN or infinite where they overflowed. Gradients in float16,
        bfloat16 and float8 come in float32, others in their own type.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.
        TypeError: if ``fun`` or ``value_and_grad`` is no function; when called, if the
            value is not a floating-point scalar, or ``value_and_grad`` returns
            something else than ``jax.value_and_grad`` does.

    Warns:
        UserWarning: if the loss is float16, since a scale above 65504 is infinite in
            it: return the loss in float32. If ``state`` is a constant of the function
            that ``jax.jit`` compiles, and not that of a `FixedLossScale`.

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

        Models of Flax NNX and Equinox are differentiated by these themselves::

            fun = ls.value_and_grad(
                loss_fn, optimizer, value_and_grad=nnx.value_and_grad
            )
            loss, grads = fun(model, x, y)

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """
    get_effective_state(state)  # refuses at once what holds no loss scale
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
        # An optimizer of Flax NNX may have changed since.
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
    """Create a function that returns the true gradients of a loss.

    `value_and_grad` without the value, as ``jax.grad`` is to ``jax.value_and_grad``.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: an optimizer state with one `LossScaleState` in it, or that state.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments, whose gradients are ``float0``.
        value_and_grad: the function that differentiates: ``jax.value_and_grad``, or one
            with its results, such as ``flax.nnx.value_and_grad`` or
            ``equinox.filter_value_and_grad``. It is called with ``has_aux=True`` and
            those of the arguments above that are not left at their defaults.

    Returns:
        A function with the arguments of ``fun`` that returns the gradients, with
        ``has_aux`` paired with the auxiliary output.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.
        TypeError: when called, if the value is not a floating-point scalar.

    Warns:
        UserWarning: if the loss is float16 or the state a constant, as for
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
