"""A scale for each part of a network, chosen while the backward pass runs."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from .._finite import AxisName, across
from .._jax_internals import zeros_like_aval
from .._rules.growth import exact_power
from .._rules.headroom import HeadroomLossScale
from .._tree import dtype_of, is_inexact, multiply, wide_dtype
from .._validation import check_concrete, describe
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

    One scale for a whole network is a compromise where its gradients span more octaves
    than float16 has. Put this around each block, a layer for example: the cotangent
    that arrives is multiplied by a power of two that suits it, and what leaves the
    block is divided by the same number. There is no state, and nothing to skip unless
    ``fun`` itself overflows. ::

        def layer(params, x):                           # float32 in
            params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
            return nn.relu(x @ params["w"] + params["b"]).astype(jnp.float32)  # and out

        x = ls.scale_backward(layer)(params, x)

        tx = ls.with_loss_scaling(optax.adamw(3e-4), ls.FixedLossScale(1.0))

    The optimizer is then wrapped only to skip what overflowed inside of a block, and
    ``jax.grad`` will do. Any function of arrays serves, also as the decorator of an
    Equinox module's method: ``@ls.scale_backward``, or with options
    ``@functools.partial(ls.scale_backward, headroom=8)``. Parameters may be arguments
    or closed over. Every gradient leaves in the type of its argument. So arguments and
    output should be float32, and the block should cast inside: what passes its border
    in float16 may underflow there.

    The scale is the largest power of two that leaves ``headroom`` octaves free, from
    2**-126 to 2**126. What must fit is the sum of the cotangent's absolute values over
    all axes but the last, since gradients of parameters are such sums:
    ``suggest_loss_scale(jnp.abs(cotangent).sum(axis=0))``, in these bounds, suggests
    the same. A cotangent of zeros stays zero. The scale is 1 if the cotangent holds NaN
    or infinity, which pass on as they are. Where calls are nested, the inner one sees
    the scaled cotangent of the outer one. A range that is too wide within one block is
    not cured, nor an overflow of the forward pass.

    Under ``jax.vmap`` every member has a scale of its own. The gradients of what they
    share are then computed for each of them, in as many times the memory, and added;
    ``scale_backward(jax.vmap(fun))`` adds first. Derivatives of derivatives are right,
    and it is the first backward pass that is scaled. Forward mode is refused by jax.

    A module of Flax Linen or Haiku is a function of arrays in its ``apply``. A module
    of Flax NNX may be an argument or closed over, as long as it does not change.

    To look at the cotangents that arrive, add zeros to the block's output and
    differentiate by these, as the second example does.

    Args:
        fun: a function of pytrees. Its arguments besides jax arrays, such as numbers,
            strings and NumPy arrays, are passed as they are. It is traced, as under
            ``jax.jit``, and must not change its arguments or have effects other than
            those of ``jax.debug``.
        dtype: the floating-point type that ``fun`` computes in, or its name.
        headroom: how many octaves (factors of two) to leave free between the largest
            of these sums and the type's maximum, from 0 to 126, for gradients that grow
            inside of ``fun``. There is no state that would adapt: a block that
            overflows in every step, so that every step is skipped, needs more. A gain
            that all features share is such a case.
        axis_name: the mapped axis, or a tuple of them, over whose devices
            (``shard_map``, ``pmap``) or members (``vmap``) the scale is the same. It is
            needed where ``fun`` or its gradient communicates along an axis.

    Returns:
        A function equal to ``fun``, but for its derivative in reverse mode, which is
        the same within rounding.

    Raises:
        TypeError: if ``fun`` is no function; when called, if it has effects.
        ValueError: if ``dtype`` is no floating-point type or ``headroom`` is out of
            range; when called, if ``fun`` changes its arguments; when differentiated,
            if ``axis_name`` is not bound, or an axis is missing from it.

    Warns:
        UserWarning: when differentiated, if the function returns float16 or float8 or
            is differentiated with respect to it: gradients may underflow there, where
            they are not scaled.

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

        The cotangent of the block's output, as the gradient by a zero:

        >>> def loss_fn(zero, w):
        ...     return 2.0**-30 * (block(w) + zero)
        >>> jax.grad(loss_fn)(0.0, jnp.ones(2)) * 2.0**30
        Array(1., dtype=float32, weak_type=True)

    References:
        Zhao et al., `Adaptive Loss Scaling for Mixed Precision Training
        <https://arxiv.org/abs/1910.12385>`_, 2019, which has a scale for each layer
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {describe(fun)}. Pass the function itself: "
            "`scale_backward(layer)(params, x)`."
        )
    check_concrete("headroom", headroom, "Pass a number: it is compiled in.")
    rule = HeadroomLossScale(headroom=headroom, dtype=dtype)  # it checks them
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
                "`scale_backward` has no derivative in forward mode, since there is no "
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
    """Return a block as a function of its inputs, with a backward pass of its own."""

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
    """Return the largest sum of absolute values over the batch, which bounds all sums.

    The gradient of a parameter is such a sum. Where all examples agree it is as many
    times as large as what arrives, which no fixed headroom can foresee.
    """
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    largest = jnp.zeros((), jnp.float32)
    for x in filter(is_inexact, cotangents):
        x = jnp.abs(jax.lax.stop_gradient(x).astype(wide_dtype(x.dtype)))
        # The last axis is that of the features, but for one number an example.
        sums = jnp.sum(x, tuple(range(max(x.ndim - 1, min(x.ndim, 1)))))
        largest = jnp.maximum(largest, jnp.max(sums, initial=0).astype(jnp.float32))
    return across(jax.lax.pmax, devices * largest, axis_name)


def _octaves_below(magnitude: jax.Array, bound: float) -> jax.Array:
    """Return how many whole octaves a magnitude is below a bound, from -126 to 126.

    From the 24th on, the bits of a positive float count its octaves. NaN and infinity
    are 0 octaves below any bound.
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
