"""A backward pass at a scale: a given one, or its own for each block of a network."""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from .._find import scale_state_in_use
from .._finite import across
from .._jax_internals import (
    COLLECTIVE,
    DEBUGGING,
    MUTABLE_ARRAYS,
    effect_names,
    zeros_like_aval,
)
from .._precision import exact_power
from .._tree import is_inexact, is_narrow, multiply, wide_dtype
from .._validation import AxisName, check, check_scale, describe
from . import nnx_objects
from .reverse_mode import reverse_mode_only
from .traced_call import check_axes, evaluate, refuse_effects, traced_call

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


def scale_backward(
    fun: Callable[Arguments, Output],
    *,
    scale: Any = None,
    dtype: Any = jnp.float16,
    headroom: float = 6.0,
    axis_name: AxisName | None = None,
) -> Callable[Arguments, Output]:
    """Create a function whose backward pass runs at a loss scale.

    Values and gradients stay true, and any function may differentiate it, such as the
    ``jax.grad``, ``nnx.value_and_grad`` or ``eqx.filter_value_and_grad`` of a trainer
    that takes your loss. With ``scale``, put it around the loss::

        jax.value_and_grad(ls.scale_backward(loss_fn, scale=opt_state))(params, batch)

    Without ``scale``, put it around each block of a network, for example each layer, if
    the gradients span more octaves than float16 has, so that one scale for all of them
    is a compromise::

        @ls.scale_backward
        def layer(params, x):  # float32 in, float32 out, float16 inside
            params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
            return nn.relu(x @ params["w"] + params["b"]).astype(jnp.float32)

    The cotangent that arrives at a block is multiplied by a power of two that suits it,
    and the gradients that leave the block are divided by it. There is no state. Wrap
    the optimizer with ``FixedLossScale(1.0)`` to skip a step if a block overflows.

    Args:
        fun: a function of pytrees, traced as under ``jax.jit``. It must not change its
            arguments, but with ``scale`` Flax NNX modules may change. It must not have
            effects other than those of ``jax.debug``.
        scale: an optimizer state, as for `value_and_grad`, an ``nnx.Optimizer``, or a
            number above 0. Without it, each backward pass chooses a scale of its own,
            and the arguments below say how.
        dtype: the floating-point type in which ``fun`` computes, or its name.
        headroom: how many octaves (factors of two) to leave free for gradients that
            grow inside ``fun``, from 0 to 126.
        axis_name: the mapped axis, or a tuple of them, along which all share one scale.
            It is needed if ``fun`` or its gradient communicates along an axis.

    Returns:
        A function with the values and, up to rounding, the gradients of ``fun``. With
        ``scale`` they are those of `value_and_grad` bit for bit, but each gradient has
        the type of its parameter, float16 as well.

    Raises:
        TypeError: if ``fun`` is not a function; when called, if it has effects; without
            ``scale``, when differentiated in forward mode.
        ValueError: if ``dtype`` or ``headroom`` is out of range; when called, if
            ``scale`` has no loss scale, or ``fun`` changes its arguments; when
            differentiated, if ``axis_name`` is not bound or lacks an axis.

    Warns:
        UserWarning: when differentiated, if gradients enter or leave in float16 or
            float8, where they may underflow; when called, as `value_and_grad` if the
            state is a constant.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> @ls.scale_backward
        ... def block(w):  # without it the gradient is 0
        ...     return jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> jax.grad(lambda w: 2.0**-30 * block(w))(jnp.ones(2)) * 2.0**30
        Array([1., 1.], dtype=float32)

    References:
        `Adaptive Loss Scaling <https://arxiv.org/abs/1910.12385>`_, a scale per layer
    """
    check("block", fun, "fun")
    headroom = check("headroom", headroom)
    bound = float(jnp.finfo(check("dtype", dtype)).max) / 2.0**headroom
    frame = sys._getframe(1)
    made_at = frame.f_code.co_filename, frame.f_lineno

    @functools.wraps(fun, updated=())
    def fun_at_given_scale(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        def call(arrays: Any) -> Any:
            return nnx_objects.on_copies(lambda a, k: (fun(*a, **k), None), arrays)[0]

        # Read now: a Flax NNX optimizer may have changed since.
        factor = jax.lax.stop_gradient(_given(scale))
        with nnx_objects.changes_transferred():
            # What `fun` closes over is an input, too.
            program = traced_call(call, nnx_objects.as_arrays((args, kwargs)))
            refuse_effects(effect_names(program.jaxpr) & MUTABLE_ARRAYS)
            inputs = _hooked("takes", program.inputs, 1 / factor, made_at)
            outputs = evaluate(program.jaxpr, *inputs)
            outputs = _hooked("returns", outputs, factor, made_at)
            return nnx_objects.output_of(program.put_back(outputs))

    @functools.wraps(fun, updated=())
    def fun_scaled_backward(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        block = traced_call(fun, *args, **kwargs)
        refuse_effects(effect_names(block.jaxpr) - {COLLECTIVE, *DEBUGGING})
        inputs = [reverse_mode_only(x) if is_inexact(x) else x for x in block.inputs]
        scaled = _scaled(block.jaxpr, bound, axis_name, made_at)
        return block.put_back(scaled(*inputs))

    return fun_scaled_backward if scale is None else fun_at_given_scale


def _given(scale: Any) -> jax.Array:
    """Return a scale that is a number, or that of a state."""
    if isinstance(scale, float | int | np.generic | jax.Array):
        check_scale("scale", scale)
        return jnp.asarray(scale, jnp.float32)
    return scale_state_in_use(scale).loss_scale


def _hooked(
    verb: str, arrays: Sequence[Any], factor: jax.Array, where: tuple[str, int]
) -> Sequence[Any]:
    """Return the same arrays, but multiply their derivatives by a factor."""

    @jax.custom_jvp
    def hooked(x: Any, factor: jax.Array) -> Any:
        return x

    @hooked.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        x, factor = primals
        _warn_of_underflow(verb, [x], where)
        return x, multiply(tangents[0], factor.astype)

    return [hooked(x, factor) if is_inexact(x) else x for x in arrays]


def _scaled(
    jaxpr: Jaxpr,
    bound: float,
    axis_name: AxisName | None,
    where: tuple[str, int],
) -> Callable[..., Sequence[jax.Array]]:
    """Return a block as a function of its inputs whose backward pass is scaled."""

    def forward(*primals: Any) -> tuple[Sequence[jax.Array], Any]:
        inputs = [x.value for x in primals]
        differentiated = [x.value if x.perturbed else None for x in primals]
        check_axes(jaxpr, axis_name)

        def block(differentiated: list[Any]) -> tuple[Any, Sequence[jax.Array]]:
            pairs = zip(inputs, differentiated, strict=True)
            outputs = evaluate(jaxpr, *(x if d is None else d for x, d in pairs))
            return list(filter(is_inexact, outputs)), outputs

        _, pullback, outputs = jax.vjp(block, differentiated, has_aux=True)
        _warn_of_underflow("takes", differentiated, where)
        _warn_of_underflow("returns", outputs, where)
        return outputs, pullback

    def backward(pullback: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        cotangents = [
            zeros_like_aval(x.aval) if isinstance(x, SymbolicZero) else x
            for x in filter(is_inexact, cotangents)
        ]
        octaves = _octaves_below(_largest_sums(cotangents, axis_name), bound)
        scaled = multiply(cotangents, exact_power(octaves).astype)
        program = traced_call(pullback, scaled)
        check_axes(program.jaxpr, axis_name)
        (scaled_grads,) = program.put_back(evaluate(program.jaxpr, *program.inputs))
        return tuple(multiply(scaled_grads, exact_power(-octaves).astype))

    apply = jax.custom_vjp(functools.partial(evaluate, jaxpr))
    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply


def _warn_of_underflow(
    verb: str, arrays: Sequence[Any], where: tuple[str, int]
) -> None:
    """Warn if gradients cross the border of a block in a type that needs a scale."""
    narrow = list(filter(is_narrow, arrays))
    if narrow:
        warnings.warn_explicit(
            "Gradients may underflow at the border of a block wrapped by "
            f"`scale_backward`, because it {verb} {describe(narrow[0])}. They are "
            "scaled only inside the block. Pass float32, cast inside the block, and "
            "return float32.",
            UserWarning,
            *where,
        )


def _largest_sums(cotangents: Sequence[Any], axis_name: AxisName | None) -> jax.Array:
    """Return the largest sum over the batch that gradients of parameters may be.

    It comes twice, the second time 2**-64 as large, since a sum of finite numbers may
    be infinite.
    """
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    largest = jnp.zeros(2, jnp.float32)
    for x in cotangents:
        x = jax.lax.stop_gradient(x).astype(wide_dtype(x.dtype))
        # The last axis holds the features, unless there is one number per example.
        batch = tuple(range(max(x.ndim - 1, min(x.ndim, 1))))
        sums = [jnp.sum(jnp.abs(x * factor), batch) for factor in (1.0, 2.0**-64)]
        maxima = jnp.stack([jnp.max(x, initial=0) for x in sums])
        largest = jnp.maximum(largest, maxima.astype(jnp.float32))
    return across(jax.lax.pmax, devices * largest, axis_name)


def _octaves_below(magnitudes: jax.Array, bound: float) -> jax.Array:
    """Return how many whole octaves the first magnitude is below a bound.

    It is 0 for NaN and inf. The second, 2**-64 as large, counts if the first is inf.
    """
    # The bits of a positive float from the 24th on count its octaves.
    bits = jax.lax.bitcast_convert_type(magnitudes, jnp.int32)
    octaves = (int(np.float32(bound).view(np.int32)) - bits) >> 23
    octaves = jnp.clip(octaves - jnp.array([0, 64]), -126, 126)
    octaves = jnp.where(jnp.isfinite(magnitudes), octaves, 0)
    return jnp.where(jnp.isfinite(magnitudes[0]), octaves[0], octaves[1])
