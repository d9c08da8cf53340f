"""Differentiate a loss in low precision without losing its gradients."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._find import get_effective_state, warn_if_constant
from ._tree import dtype_of, scale_loss_by, unscale
from ._validation import describe


def value_and_grad(
    fun: Callable[..., Any],
    state: Any,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
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
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments, whose gradients are ``float0``.

    Returns:
        A function with the arguments of ``fun`` that returns the value and the
        gradients, still NaN or infinite where they overflowed. Gradients in float16,
        bfloat16 and float8 come in float32, others in their own type.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.
        TypeError: if ``fun`` is no function; when called, if the value is not a
            floating-point scalar.

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

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function that returns a loss, got {describe(fun)}. Pass "
            "the function itself: `value_and_grad(loss_fn, opt_state)(params, batch)`."
        )
    scale_state = get_effective_state(state)
    scale = scale_state.loss_scale

    @functools.wraps(fun)
    def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        output = fun(*args, **kwargs)
        if has_aux and not (isinstance(output, tuple | list) and len(output) == 2):
            raise TypeError(
                "`fun` must return a pair (loss, aux) with has_aux=True, got "
                f"{describe(output)}. Return a pair, or leave `has_aux` out."
            )
        value, aux = output if has_aux else (output, None)
        # Only the derivative of this product is used, so XLA drops the product.
        return scale_loss_by(value, scale), (value, aux)

    differentiated = jax.value_and_grad(
        scaled_fun, argnums, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
    )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        warn_if_constant(scale_state)
        (_, (value, aux)), scaled_grads = differentiated(*args, **kwargs)
        dtype = dtype_of(value)
        if float(jnp.finfo(dtype).max) <= 65504.0:
            warnings.warn(
                f"The loss is {dtype}, in which a loss scale of 2**16 "
                "is infinite and so are then all gradients. Return it in float32: "
                "`loss.astype(jnp.float32)` before the last mean or sum.",
                stacklevel=2,
            )
        return (value, aux) if has_aux else value, unscale(scaled_grads, scale)

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    state: Any,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
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
    differentiated = value_and_grad(
        fun,
        state,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiated(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def scale_loss(loss: jax.typing.ArrayLike, state: Any) -> jax.Array:
    """Multiply a loss by the loss scale, for loops that differentiate it themselves.

    Args:
        loss: a floating-point loss of any shape.
        state: an optimizer state with one `LossScaleState` in it, or that state.

    Returns:
        The scaled loss, in float32 or wider. Report ``loss`` itself, not this.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.
        TypeError: if ``loss`` is not a floating-point or complex array.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> opt_state = ls.with_loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
        >>> def scaled_loss_fn(w):
        ...     return ls.scale_loss(jnp.sum(w**2), opt_state)
        >>> ls.unscale_grads(jax.grad(scaled_loss_fn)(jnp.ones(2)), opt_state)
        Array([2., 2.], dtype=float32)
    """
    scale_state = get_effective_state(state)
    warn_if_constant(scale_state)
    return scale_loss_by(loss, scale_state.loss_scale)


def unscale_grads(grads: Any, state: Any) -> Any:
    """Divide the gradients of a scaled loss by the loss scale.

    Args:
        grads: a pytree of gradients of ``scale_loss(loss, state)``.
        state: the state that scaled that loss, before the optimizer's ``update``.

    Returns:
        The true gradients: float16, bfloat16 and float8 in float32, others in their
        own type. Integers, ``float0`` and None are left as they are.

    Raises:
        ValueError: if ``state`` has no loss scale in it, or more than one, or has it
            where its rule would not see an overflow.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> state = ls.FixedLossScale(1024.0).init()
        >>> ls.unscale_grads({"w": jnp.float16([512.0]), "b": None}, state)
        {'b': None, 'w': Array([0.5], dtype=float32)}
    """
    scale_state = get_effective_state(state)
    warn_if_constant(scale_state)
    return unscale(grads, scale_state.loss_scale)
