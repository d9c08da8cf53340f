"""A backward pass at a given loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._find import scale_state_in_use
from .._jax_internals import MUTABLE_ARRAYS, effect_names
from .._precision import is_inexact, is_narrow
from .._validation import check, check_scale, describe
from .._warn import NOTED, warn
from . import nnx_objects
from .scaling import finite_overwrite, is_overwritten, multiply
from .traced_call import evaluate, refuse_effects, traced_call

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


def scale_backward(
    fun: Callable[Arguments, Output], scale: Any = None
) -> Callable[Arguments, Output]:
    """Create a function whose backward pass runs at a loss scale.

    Use it if a trainer takes your loss and differentiates it itself, with ``jax.grad``,
    ``nnx.value_and_grad`` or ``eqx.filter_value_and_grad``::

        jax.value_and_grad(ls.scale_backward(loss_fn, opt_state))(params, batch)

    Values and gradients stay true. For a block that chooses its own scale, use
    `scale_block`.

    Args:
        fun: a function of pytrees, traced as under ``jax.jit``. It must not change its
            arguments, except for Flax NNX modules, nor a ``jax.Ref``.
        scale: an optimizer state, as for `value_and_grad`, an ``nnx.Optimizer``, or a
            number above 0.

    Returns:
        A function with the values of ``fun``. Its gradients are those of
        `value_and_grad` bit for bit, but each has the type of its parameter, float16 as
        well. It has no derivative in forward mode, which has no backward pass to scale.

    Raises:
        TypeError: if ``fun`` is not a function, or ``scale`` is left out; when called,
            if ``fun`` reads or changes a ``jax.Ref`` from outside; when differentiated
            in forward mode.
        ValueError: when called, if ``scale`` has no loss scale, or ``fun`` changes its
            arguments.

    Warns:
        UserWarning: when differentiated, if gradients enter or leave in float16 or
            float8, where they may underflow; when called, as `value_and_grad` if the
            state is a constant.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> def loss_fn(w):  # `jax.grad` returns 0
        ...     return 2.0**-30 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> state = ls.DynamicLossScale().init()
        >>> jax.grad(ls.scale_backward(loss_fn, state))(jnp.ones(2)) * 2.0**30
        Array([1., 1.], dtype=float32)
    """
    check("loss_fn", fun, "fun")
    if scale is None:
        raise TypeError(
            "`scale` must be an optimizer state or a number, got None. Pass the state "
            "of this step. For a block that chooses its own scale, use `scale_block`."
        )

    @functools.wraps(fun, updated=())
    def fun_scaled_backward(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        def call(arrays: Any) -> Any:
            return nnx_objects.on_copies(lambda a, k: (fun(*a, **k), None), arrays)[0]

        # Read now: a Flax NNX optimizer may have changed since.
        factor = jax.lax.stop_gradient(_number(scale))
        with nnx_objects.changes_transferred():
            # What `fun` closes over is an input, too.
            given = nnx_objects.as_arrays((args, kwargs))
            program = traced_call(call, given)
            refuse_effects(effect_names(program.jaxpr) & MUTABLE_ARRAYS)
            inputs = _hooked("takes", program.inputs, 1 / factor)
            leaves = jax.tree.leaves_with_path(given)
            paths = [path for path, x in leaves if isinstance(x, jax.Array)]
            for i, path in enumerate(reversed(paths), start=1):
                if is_overwritten(path):
                    inputs[-i] = finite_overwrite(program.inputs[-i])
            outputs = evaluate(program.jaxpr, *inputs)
            outputs = _hooked("returns", outputs, factor)
            return nnx_objects.output_of(program.put_back(outputs))

    return fun_scaled_backward


def _number(scale: Any) -> jax.Array:
    """Return a scale that is a number, or that of a state."""
    if isinstance(scale, float | int | np.generic | jax.Array):
        check_scale("scale", scale)
        NOTED.add("scale read")
        return jnp.asarray(scale, jnp.float32)
    return scale_state_in_use(scale).loss_scale


def _hooked(verb: str, arrays: Sequence[Any], factor: jax.Array) -> list[Any]:
    """Return the same arrays, but multiply their cotangents by a factor."""

    @jax.custom_vjp
    def hooked(x: Any, factor: jax.Array) -> Any:
        return x

    def forward(x: Any, factor: jax.Array) -> tuple[Any, jax.Array]:
        warn_of_underflow("scale_backward", verb, [x])
        return x, factor

    def backward(factor: jax.Array, cotangent: Any) -> tuple[Any, jax.Array]:
        return multiply(cotangent, factor.astype), jnp.zeros_like(factor)

    hooked.defvjp(forward, backward)
    return [hooked(x, factor) if is_inexact(x) else x for x in arrays]


def warn_of_underflow(function: str, verb: str, arrays: Sequence[Any]) -> None:
    """Warn if gradients cross the border of a block in a type that needs a scale."""
    narrow = list(filter(is_narrow, arrays))
    if narrow:
        warn(
            "Gradients may underflow at the border of a block wrapped by "
            f"`{function}`, because it {verb} {describe(narrow[0])}. They are scaled "
            "only inside the block. Pass float32, cast inside the block, and return "
            "float32."
        )
