"""A backward pass at a scale of its own, for each block of a network."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from .._devices import AxisName, across
from .._jax_internals import COLLECTIVE, DEBUGGING, effect_names, zeros_like_aval
from .._precision import exact_power, is_inexact, wide_dtype
from .._validation import check
from .scale_backward import warn_of_underflow
from .scaling import multiply
from .traced_call import check_axes, evaluate, refuse_effects, traced_call

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


def scale_block(
    fun: Callable[Arguments, Output],
    *,
    dtype: Any = jnp.float16,
    headroom: float = 6.0,
    axis_name: AxisName | None = None,
) -> Callable[Arguments, Output]:
    """Create a function that chooses a loss scale of its own in each backward pass.

    Put it around each block of a network, for example each layer, if the gradients span
    more octaves than float16 has, so that one scale for all of them is a compromise::

        @ls.scale_block
        def layer(params, x):  # float32 in, float32 out, float16 inside
            params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
            return nn.relu(x @ params["w"] + params["b"]).astype(jnp.float32)

    The cotangent that arrives at a block is multiplied by a power of two that suits it,
    and the gradients that leave the block are divided by it. Values and gradients stay
    true. There is no state. Wrap the optimizer with ``FixedLossScale(1.0)`` to skip a
    step if a block overflows.

    Args:
        fun: a function of pytrees, traced as under ``jax.jit``. It must not change its
            arguments or have effects other than those of ``jax.debug``.
        dtype: the floating-point type in which ``fun`` computes, or its name.
        headroom: how many octaves (factors of two) to leave free for gradients that
            grow inside ``fun``, from 0 to 126.
        axis_name: the mapped axis, or a tuple of them, along which all share one scale.
            It is needed if ``fun`` or its gradient communicates along an axis.

    Returns:
        A function with the values and, up to rounding, the gradients of ``fun``. It has
        no derivative in forward mode, which has no backward pass to scale.

    Raises:
        TypeError: if ``fun`` is not a function; when called, if it has effects; when
            differentiated in forward mode.
        ValueError: if ``dtype`` or ``headroom`` is out of range; when called, if
            ``fun`` changes its arguments; when differentiated, if ``axis_name`` is not
            bound or lacks an axis.

    Warns:
        UserWarning: when differentiated, if gradients enter or leave in float16 or
            float8, where they may underflow.

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
    check("block", fun, "fun")
    headroom = check("headroom", headroom)
    bound = float(jnp.finfo(check("dtype", dtype)).max) / 2.0**headroom

    @functools.wraps(fun, updated=())
    def fun_scaled_backward(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        block = traced_call(fun, *args, **kwargs)
        refuse_effects(effect_names(block.jaxpr) - {COLLECTIVE, *DEBUGGING})
        return block.put_back(_scaled(block.jaxpr, bound, axis_name)(*block.inputs))

    return fun_scaled_backward


def _scaled(
    jaxpr: Jaxpr,
    bound: float,
    axis_name: AxisName | None,
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
        warn_of_underflow("scale_block", "takes", differentiated)
        warn_of_underflow("scale_block", "returns", outputs)
        return outputs, pullback

    def backward(pullback: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        cotangents = [
            zeros_like_aval(x.aval) if isinstance(x, SymbolicZero) else x
            for x in filter(is_inexact, cotangents)
        ]
        octaves = _octaves_below(_largest_sum(cotangents, axis_name), bound)
        scaled = multiply(cotangents, exact_power(octaves).astype)
        program = traced_call(pullback, scaled)
        check_axes(program.jaxpr, axis_name)
        (scaled_grads,) = program.put_back(evaluate(program.jaxpr, *program.inputs))
        return tuple(multiply(scaled_grads, exact_power(-octaves).astype))

    apply = jax.custom_vjp(functools.partial(evaluate, jaxpr))
    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply


def _largest_sum(cotangents: Sequence[Any], axis_name: AxisName | None) -> jax.Array:
    """Return the largest sum over the batch that gradients of parameters may be."""
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    largest = jnp.zeros((), jnp.float32)
    for x in cotangents:
        x = jax.lax.stop_gradient(x).astype(wide_dtype(x.dtype))
        # The last axis holds the features, unless there is one number per example.
        batch = tuple(range(max(x.ndim - 1, min(x.ndim, 1))))
        sums = jnp.sum(jnp.abs(x), batch).astype(jnp.float32)
        largest = jnp.maximum(largest, jnp.max(sums, initial=0))
    return across(jax.lax.pmax, devices * largest, axis_name)


def _octaves_below(magnitude: jax.Array, bound: float) -> jax.Array:
    """Return how many whole octaves a magnitude is below a bound; 0 for NaN and inf."""
    # The bits of a positive float from the 24th on count its octaves.
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
    octaves = (int(np.float32(bound).view(np.int32)) - bits) >> 23
    return jnp.where(jnp.isfinite(magnitude), jnp.clip(octaves, -126, 126), 0)
