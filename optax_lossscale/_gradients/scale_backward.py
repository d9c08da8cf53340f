"""A loss scale for each block of a network, chosen during the backward pass."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from .._finite import across
from .._jax_internals import zeros_like_aval
from .._precision import exact_power
from .._rules.headroom import HeadroomLossScale
from .._tree import dtype_of, is_inexact, multiply, wide_dtype
from .._validation import AxisName, describe
from .checks import check_axes, check_effects, warn_of_underflow
from .staged import evaluate, staged

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


def scale_backward(
    fun: Callable[Arguments, Output],
    *,
    dtype: Any = jnp.float16,
    headroom: float = 6.0,
    axis_name: AxisName | None = None,
) -> Callable[Arguments, Output]:
    """Create a function whose backward pass runs at a loss scale of its own.

    Use it around each block of a network, for example each layer, if the gradients span
    more octaves than float16 has. One scale for the whole network is then a
    compromise::

        def layer(params, x):                           # float32 in
            params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
            return nn.relu(x @ params["w"] + params["b"]).astype(jnp.float32)  # and out

        x = ls.scale_backward(layer)(params, x)

        tx = ls.with_loss_scaling(optax.adamw(3e-4), ls.FixedLossScale(1.0))

    The cotangent that arrives at a block is multiplied by a power of two that suits it,
    and the gradients that leave the block are divided by the same number. There is no
    state, and ``jax.grad`` is enough to differentiate the loss. The wrapped optimizer
    only skips steps in which a block itself overflowed.

    ``fun`` may be any function of arrays, and its parameters may be arguments or closed
    over. Pass the ``apply`` of a Flax Linen or Haiku module. Flax NNX modules may be
    arguments or closed over, as long as they do not change. On a method of an Equinox
    module, use the decorator ``@ls.scale_backward``, or with options
    ``@functools.partial(ls.scale_backward, headroom=8)``.

    Use float32 for the arguments and the output, and cast inside the block. Every
    gradient has the type of its argument and is not scaled outside the block, so
    float16 gradients may underflow at its border.

    The scale is the largest power of two that leaves ``headroom`` octaves free, from
    2**-126 to 2**126. The sum of the cotangent's absolute values over all axes but the
    last must fit, because gradients of parameters are such sums. Within these bounds
    it is the scale of ``suggest_loss_scale(jnp.abs(cotangent).sum(axis=0))``. Zeros
    stay zero. If the cotangent contains NaN or inf, the scale is 1, and they pass
    unchanged. In nested calls, the inner block sees the outer one's scaled cotangent.

    It does not cure a range that is too wide within one block, nor an overflow of the
    forward pass.

    Under ``jax.vmap`` every member has its own scale. The gradients of shared
    parameters are then computed and stored for each member before they are added.
    ``scale_backward(jax.vmap(fun))`` adds them first. Higher derivatives are correct;
    only the first backward pass is scaled. Forward mode is not supported.

    To see the cotangents that arrive at a block, add zeros to its output and
    differentiate with respect to them, as in the second example.

    Args:
        fun: a function of pytrees. Arguments that are not jax arrays, such as numbers,
            strings and NumPy arrays, are passed unchanged. It is traced as under
            ``jax.jit``. It must not change its arguments, nor have effects other than
            those of ``jax.debug``.
        dtype: the floating-point type in which ``fun`` computes, or its name.
        headroom: how many octaves (factors of two) to leave free between the largest
            of the sums above and the type's maximum, from 0 to 126. This is the room
            for gradients that grow inside ``fun``. It does not adapt. If a block
            overflows in every step, so that all steps are skipped, increase it. A gain
            that all features share can cause this.
        axis_name: the mapped axis, or a tuple of them, along which all devices
            (``shard_map``, ``pmap``) or members (``vmap``) share one scale. It is
            needed if ``fun`` or its gradient communicates along an axis.

    Returns:
        A function that computes what ``fun`` does. Its reverse-mode derivative is equal
        to that of ``fun`` up to rounding.

    Raises:
        TypeError: if ``fun`` is not a function; when called, if it has effects; when
            differentiated in forward mode.
        ValueError: if ``dtype`` is not a floating-point type or ``headroom`` is out of
            range; when called, if ``fun`` changes its arguments; when differentiated,
            if ``axis_name`` is not bound or lacks an axis.

    Warns:
        UserWarning: when differentiated, if the function returns float16 or float8, or
            is differentiated with respect to such an argument, because gradients may
            underflow where they are not scaled.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> def half(w):
        ...     return jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> block = ls.scale_backward(half)
        >>> jax.grad(lambda w: 2.0**-30 * half(w))(jnp.ones(2))
        Array([0., 0.], dtype=float32)
        >>> jax.grad(lambda w: 2.0**-30 * block(w))(jnp.ones(2)) * 2.0**30
        Array([1., 1.], dtype=float32)

        The cotangent of the block's output is the gradient of an added zero:

        >>> def loss_fn(zero, w):
        ...     return 2.0**-30 * (block(w) + zero)
        >>> jax.grad(loss_fn)(0.0, jnp.ones(2)) * 2.0**30
        Array(1., dtype=float32, weak_type=True)

    References:
        Zhao et al., `Adaptive Loss Scaling for Mixed Precision Training
        <https://arxiv.org/abs/1910.12385>`_, 2019, with a scale for each layer
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {describe(fun)}. Pass the function itself: "
            "`scale_backward(layer)(params, x)`."
        )
    rule = HeadroomLossScale(headroom=headroom, dtype=dtype)  # checks both
    bound = float(jnp.finfo(rule.dtype).max) / 2.0**rule.headroom

    @functools.wraps(fun, updated=())
    def fun_scaled_backward(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        caller = sys._getframe(1)
        where = (caller.f_code.co_filename, caller.f_lineno)
        block = staged(fun, *args, **kwargs)
        check_effects(block.jaxpr)
        try:
            outputs = _scaled(block.jaxpr, bound, axis_name, where)(*block.inputs)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                "`scale_backward` has no derivative in forward mode, which has no "
                "backward pass to scale. Use reverse mode (`jax.grad`, `jax.vjp`, "
                "`jax.jacrev`), or differentiate `fun` itself."
            ) from error
        return block.put_back(outputs)

    return fun_scaled_backward


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

        def block(differentiated: list[Any]) -> Sequence[jax.Array]:
            pairs = zip(inputs, differentiated, strict=True)
            return evaluate(jaxpr, *(x if d is None else d for x, d in pairs))

        outputs, pullback = jax.vjp(block, differentiated)
        warn_of_underflow(differentiated, outputs, where)
        return outputs, pullback

    def backward(pullback: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        cotangents = list(map(_instantiated, cotangents))
        largest = _largest_sum(cotangents, axis_name)
        octaves = _octaves_below(largest, bound)
        scale = exact_power(octaves)
        program = staged(pullback, _multiplied(cotangents, scale))
        check_axes(program.jaxpr, axis_name)
        (scaled_grads,) = program.put_back(evaluate(program.jaxpr, *program.inputs))
        return tuple(_multiplied(scaled_grads, exact_power(-octaves)))

    apply = jax.custom_vjp(functools.partial(evaluate, jaxpr))
    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply


def _largest_sum(cotangents: Sequence[Any], axis_name: AxisName | None) -> jax.Array:
    """Return the largest sum of absolute values over the batch, a bound on all sums.

    The gradient of a parameter is such a sum. If all examples agree, it is larger than
    the cotangent by a factor of the batch size, which no fixed headroom can cover.
    """
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    largest = jnp.zeros((), jnp.float32)
    for x in filter(is_inexact, cotangents):
        x = jnp.abs(jax.lax.stop_gradient(x).astype(wide_dtype(x.dtype)))
        # The last axis holds the features, unless there is one number per example.
        sums = jnp.sum(x, tuple(range(max(x.ndim - 1, min(x.ndim, 1)))))
        largest = jnp.maximum(largest, jnp.max(sums, initial=0).astype(jnp.float32))
    return across(jax.lax.pmax, devices * largest, axis_name)


def _octaves_below(magnitude: jax.Array, bound: float) -> jax.Array:
    """Return how many whole octaves a magnitude is below a bound, from -126 to 126.

    The bits of a positive float from the 24th on count its octaves. The result is 0 for
    NaN and inf.
    """
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
    octaves = (int(np.float32(bound).view(np.int32)) - bits) >> 23
    return jnp.where(jnp.isfinite(magnitude), jnp.clip(octaves, -126, 126), 0)


def _instantiated(cotangent: Any) -> Any:
    """Return zeros for an output that the loss does not depend on."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return zeros_like_aval(aval)


def _multiplied(tree: Any, factor: jax.Array) -> Any:
    """Multiply each leaf in float32 or wider, and return it in its own type."""
    products = multiply(tree, factor.astype)
    return jax.tree.map(
        lambda x, product: product.astype(dtype_of(x)) if is_inexact(x) else x,
        tree,
        products,
    )
