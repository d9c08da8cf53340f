"""A backward pass at a scale that is given, or that each block chooses."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._axes import AxisName, reduce_along
from .._dtypes import is_inexact, largest_power, loses_range, wide_dtype
from .._flax_internals.float8_overwrites import finite_overwrite
from .._jax_internals import zeros_like_aval
from .._programs.rewrite import (
    COLLECTIVE,
    DEBUGGING,
    check_axes,
    evaluate,
    refuse_effects,
)
from .._programs.traced_call import TracedCall, on_traced_calls
from .._rules.fields import check_field
from .._validation import (
    Arguments,
    Output,
    advise_on_call,
    check_dtype,
    check_function,
    check_scale,
    describe,
    warn,
)
from .notes import Note, Used, note_divided, note_uses, using_scale
from .scaling import rescale

# Takes the scale from outside or None, the cotangents and the pullback. Returns the
# scale of the backward pass.
ScaleFrom = Callable[[Any, Sequence[jax.Array], Callable[..., Any]], jax.Array]


@advise_on_call(
    "Pass the optimizer state of this step, or a number, as `scale`. For a block that "
    "chooses its own scale, use `scale_block`."
)
def scale_backward(
    fun: Callable[Arguments, Output], scale: Any
) -> Callable[Arguments, Output]:
    """Create a function that applies loss scaling whenever it is differentiated.

    Use it if a trainer takes your loss and differentiates it itself, with ``jax.grad``,
    ``nnx.value_and_grad`` or ``eqx.filter_value_and_grad``::

        jax.value_and_grad(ls.scale_backward(loss_fn, opt_state))(params, batch)

    The scale multiplies the gradients only inside the backward pass. The resulting
    gradients are unscaled, and the value is never multiplied. For a block that chooses
    its own scale, use `scale_block`.

    Args:
        fun: a function of pytrees, traced as under ``jax.jit``. It must not change its
            arguments, except for Flax NNX modules, or have effects other than those of
            ``jax.debug``.
        scale: an optimizer state, as for `value_and_grad`, an ``nnx.Optimizer``, or a
            number above 0.

    Returns:
        A function with the values and the derivatives of ``fun``. It has the same
        gradients as `value_and_grad`, bit for bit, but each in the dtype of its
        parameter, even if that is float16. Forward mode is not supported.

    Raises:
        TypeError: if ``fun`` is not a function, or ``scale`` is left out; when called,
            if ``fun`` has effects; when differentiated in forward mode.
        ValueError: when called, if ``scale`` has no loss scale, or ``fun`` changes an
            array in its arguments.

    Warns:
        UserWarning: when differentiated, if gradients enter or leave in float16 or
            float8, where they may underflow.

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
    check_function("fun", fun, "It comes first: `scale_backward(loss_fn, opt_state)`.")

    def run(call: TracedCall) -> Sequence[jax.Array]:
        # Read the state now: a Flax NNX optimizer changes in place.
        with _outer_scale(scale) as (outer, used):
            outer = jax.lax.stop_gradient(outer)
            return _run_scaled("scale_backward", call, outer, lambda x, *_: x, used)

    return on_traced_calls(fun, run)


def scale_block(
    fun: Callable[Arguments, Output],
    *,
    dtype: Any = jnp.float16,
    headroom: float = 6.0,
    axis_name: AxisName | None = None,
) -> Callable[Arguments, Output]:
    """Create a function that chooses its own loss scale in each backward pass.

    Wrap each block of a network, for example each layer, if the gradients span a wider
    range than float16 has, so that no single loss scale fits all of them::

        @ls.scale_block
        def layer(params, x):  # float32 in, float32 out, float16 inside
            params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
            return nn.relu(x @ params["w"] + params["b"]).astype(jnp.float32)

    The backward pass multiplies the cotangent of the block's output by a power of two
    that suits this cotangent, and divides the gradients of the block's inputs by the
    same power. Values and gradients are unscaled, and there is no state. To skip a step
    if a block overflows, wrap the optimizer with `skip_nonfinite`.

    Args:
        fun: a function, as for `scale_backward`.
        dtype: the floating-point dtype in which ``fun`` computes, or its name. Narrower
            inputs and outputs lower the scale.
        headroom: how many powers of two to leave free for gradients that grow inside
            ``fun``, from 0 to 126.
        axis_name: the mapped axis, or a tuple of axes, along which all devices use the
            same scale. It is needed if ``fun`` or its gradient communicates along an
            axis.

    Returns:
        A function with the values and, up to rounding, the derivatives of ``fun``.
        Forward mode is not supported.

    Raises:
        TypeError: as `scale_backward`.
        ValueError: as `scale_backward`; if ``dtype`` or ``headroom`` is out of range;
            when differentiated, if ``axis_name`` is not bound or lacks an axis.

    Warns:
        UserWarning: as `scale_backward`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> @ls.scale_block
        ... def block(w):  # without it the gradient is 0
        ...     return jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> jax.grad(lambda w: 2.0**-30 * block(w))(jnp.ones(2)) * 2.0**30
        Array([1., 1.], dtype=float32)

    References:
        `Adaptive Loss Scaling <https://arxiv.org/abs/1910.12385>`_, a scale per layer
    """
    check_function("fun", fun, "Pass it as in `scale_block(layer)`.")
    headroom = check_field("headroom", headroom)
    largest = float(jnp.finfo(check_dtype("dtype", dtype)).max)

    def scale_from(_: None, cotangents: Sequence[jax.Array], pullback: Any) -> Any:
        program = jax.make_jaxpr(pullback)(cotangents).jaxpr
        check_axes(program, axis_name)
        # Inputs and outputs of the block may be narrower than ``dtype``.
        borders = [*program.invars, *program.outvars]
        dtypes = [x.aval.dtype for x in borders if is_inexact(x.aval)]
        bound = min([largest, *(float(jnp.finfo(x).max) for x in dtypes)])
        largest_sum = _largest_sum(cotangents, axis_name)
        scale = largest_power(largest_sum, bound / 2.0**headroom)
        return jnp.where(jnp.isfinite(largest_sum), scale, 1)

    def run(call: TracedCall) -> Sequence[jax.Array]:
        return _run_scaled("scale_block", call, None, scale_from)

    return on_traced_calls(fun, run)


@contextlib.contextmanager
def _outer_scale(scale: Any) -> Iterator[tuple[jax.Array, Used | None]]:
    """Yield the scale, and its state unless it is a number, while a loss is traced."""
    uses = Note.SCALES, Note.DIVIDES
    if isinstance(scale, float | int | np.generic | np.ndarray | jax.Array):
        check_scale("scale", scale)
        yield jnp.asarray(scale, jnp.float32), None
        note_uses(scale, uses)
    else:
        with using_scale(scale, *uses, name="scale") as used:
            yield used.state.loss_scale, used._replace(is_inside=True)


def _run_scaled(
    name: str,
    call: TracedCall,
    outer_scale: jax.Array | None,
    scale_from: ScaleFrom,
    used: Used | None = None,
) -> Sequence[jax.Array]:
    """Run a program whose backward pass runs at the scale from ``scale_from``.

    With a ``custom_vjp`` around each input, nested derivatives would scale in two
    places.
    """
    jaxpr, overwritten = call.jaxpr, call.overwritten
    refuse_effects(call.effects - {COLLECTIVE, *DEBUGGING})

    def forward(outer_scale: Any, *primals: Any) -> tuple[Sequence[jax.Array], Any]:
        inputs = [x.value for x in primals]
        differentiated = [x.value if x.perturbed else None for x in primals]

        def block(differentiated: list[Any]) -> tuple[Any, Sequence[jax.Array]]:
            pairs = zip(inputs, differentiated, strict=True)
            outputs = evaluate(jaxpr, *(x if d is None else d for x, d in pairs))
            return list(filter(is_inexact, outputs)), outputs

        _, pullback, outputs = jax.vjp(block, differentiated, has_aux=True)
        _warn_of_underflow(name, "takes", differentiated)
        _warn_of_underflow(name, "returns", outputs)
        return outputs, (getattr(outer_scale, "value", None), pullback)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        outer_scale, pullback = residuals
        cotangents = [
            zeros_like_aval(x.aval) if isinstance(x, SymbolicZero) else x
            for x in filter(is_inexact, cotangents)
        ]
        scale = scale_from(outer_scale, cotangents, pullback)
        (scaled_grads,) = pullback([rescale(x, scale, 1) for x in cotangents])
        pairs = zip(scaled_grads, overwritten, strict=True)
        grads = [x if is_new else rescale(x, scale, -1) for x, is_new in pairs]
        if used is not None:
            # The gradients of a parameter that nothing else uses are these arrays.
            note_divided(grads, used, scaled_grads)
        return None, *grads

    program = jax.custom_vjp(lambda _, *inputs: evaluate(jaxpr, *inputs))
    program.defvjp(forward, backward, symbolic_zeros=True)
    pairs = zip(call.inputs, overwritten, strict=True)
    inputs = [finite_overwrite(x) if o else x for x, o in pairs]
    return program(outer_scale, *inputs)


def _warn_of_underflow(function: str, verb: str, arrays: Sequence[Any]) -> None:
    """Warn if gradients cross the border of a block in a dtype that needs a scale."""
    narrow = list(filter(loses_range, arrays))
    if narrow:
        warn(
            "Gradients may underflow at the border of a block wrapped by "
            f"`{function}`, because it {verb} {describe(narrow[0])}. They are scaled "
            "only inside the block. Pass float32, cast inside the block, and return "
            "float32."
        )


def _largest_sum(cotangents: Sequence[Any], axis_name: AxisName | None) -> jax.Array:
    """Return a bound for sums of cotangents over the batch, such as bias gradients."""
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    largest = jnp.zeros((), jnp.float32)
    for x in cotangents:
        x = jax.lax.stop_gradient(x).astype(wide_dtype(x.dtype))
        # The last axis holds the features, unless there is one number per example.
        batch = range(x.ndim - 1) if x.ndim > 1 else range(x.ndim)
        sums = jnp.sum(jnp.abs(x), tuple(batch)).astype(jnp.float32)
        largest = jnp.maximum(largest, jnp.max(sums, initial=0))
    return reduce_along(jax.lax.pmax, devices * largest, axis_name)
