"""Differentiate a loss at a given scale, for the functions that take a state."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._precision import dtype_of
from .._validation import check_function, describe
from .._warn import warn
from . import nnx_objects
from .scaled_losses import differentiating
from .scaling import scale_loss_by, unscale, with_finite_overwrites


def at_scale(
    fun: Callable[..., Any],
    has_aux: bool,
    value_and_grad: Callable[..., Any],
    options: Mapping[str, Any],
) -> Callable[[jax.Array, Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]:
    """Create a function of a scale and the arguments and keywords of ``fun``.

    It returns the output of ``fun``, a tuple if ``has_aux``, and the true gradients.
    """
    check_function("fun", fun, "It comes first: `value_and_grad(loss_fn, opt_state)`.")
    advice = "Pass `nnx.value_and_grad` or another library's."
    check_function("value_and_grad", value_and_grad, advice)
    # Not every function that differentiates takes these. All default to 0 or False.
    options = {name: x for name, x in options.items() if x != 0}

    def differentiated(
        scale: jax.Array, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        if value_and_grad is jax.value_and_grad:
            nnx_objects.check_no_modules((args, kwargs))
            _check_no_functions(args, options.get("argnums", 0))

        @functools.wraps(fun, updated=())
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
            token = differentiating.set(True)
            try:
                output = fun(*with_finite_overwrites(args), **kwargs)
            finally:
                differentiating.reset(token)
            # Only the derivative of the product is used, so XLA removes the product.
            if not has_aux:
                return scale_loss_by(output, scale), output
            if not (isinstance(output, tuple | list) and len(output) == 2):
                raise TypeError(
                    "`fun` must return a pair (loss, aux) with has_aux=True, got "
                    f"{describe(output)}. Return a pair, or leave out `has_aux`."
                )
            return scale_loss_by(output[0], scale), tuple(output)

        differentiate = value_and_grad(scaled_fun, has_aux=True, **options)
        (_, output), scaled_grads = differentiate(*args, **kwargs)
        return output, unscale(scaled_grads, scale)

    return differentiated


def _check_no_functions(args: Sequence[Any], argnums: Any) -> None:
    """Raise if jax would differentiate a model that has functions among its leaves."""
    numbers = argnums if isinstance(argnums, tuple | list) else [argnums]
    chosen = [x for i, x in enumerate(args) if i in numbers]
    for path, x in jax.tree.leaves_with_path(chosen):
        if callable(x):
            raise TypeError(
                "`value_and_grad` must be a function that leaves out what is no array, "
                f"got `jax.value_and_grad` for {describe(x)} at "
                f"{jax.tree_util.keystr(path[1:])}. For an Equinox module, pass "
                "`value_and_grad=eqx.filter_value_and_grad`."
            )


def warn_of_narrow_loss(value: Any) -> None:
    """Warn if a scale above 65504 is infinite in the type of the loss."""
    dtype = dtype_of(value)
    if float(jnp.finfo(dtype).max) <= 65504.0:
        warn(
            f"The loss is {dtype}. A loss scale of 2**16, to which the default grows "
            "first, is infinite in that type, and then so are all gradients. Cast what "
            "goes into the loss, as in `loss_fn(logits.astype(jnp.float32), labels)`. "
            "A cast of the loss itself is too late."
        )
