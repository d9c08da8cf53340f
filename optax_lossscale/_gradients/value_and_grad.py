"""Differentiate a loss with loss scaling."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._flax_internals.bound_methods import wraps
from .._flax_internals.float8_overwrites import with_finite_overwrites
from .._flax_internals.nnx_objects import check_no_modules
from .._validation import Arguments, Output, advise_on_call, check_function, describe
from .notes import Note, note_divided, using_scale
from .scaling import scale_loss_by, unscale


class _Output(NamedTuple):
    """The output of the loss function, beside the scaled loss."""

    output: Any


advise_on_state = advise_on_call(
    "The optimizer state comes second: `ls.value_and_grad(loss_fn, opt_state)(params)`."
)


@advise_on_state
def value_and_grad(
    fun: Callable[Arguments, Output],
    state: Any,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    value_and_grad: Callable[..., Any] | None = None,
) -> Callable[Arguments, tuple[Output, Any]]:
    """Create a function that evaluates a loss and its gradients with loss scaling.

    Use it instead of ``jax.value_and_grad`` if the loss is computed in float16, where
    small gradients underflow. The gradients are multiplied by the loss scale during the
    backward pass, and divided by it afterward. The value is never multiplied.

    Call it inside the compiled function, with a state that is an argument of that
    function. A state from outside is compiled in as a constant, so its scale never
    changes.

    Gradients are not averaged over devices. In ``shard_map``, return
    ``jax.lax.pmean(loss, axis)`` from ``fun``: JAX then averages them. Under ``pmap``
    and with ``check_vma=False``, average the gradients instead.

    Args:
        fun: a function that returns the loss, or (loss, aux) if ``has_aux`` is True.
        state: the state, as for `get_loss_scale_state`. Pass the same one to the
            optimizer's ``update``.
        argnums: which positional arguments to differentiate, or an ``nnx.DiffState``.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments. Their gradients are ``float0``.
        value_and_grad: the function that differentiates instead of
            ``jax.value_and_grad``, such as ``flax.nnx.value_and_grad`` or
            ``equinox.filter_value_and_grad``.

    Returns:
        A function with the arguments of ``fun`` that returns the value and the unscaled
        gradients. Each gradient has the dtype of its parameter, or float32 if the
        parameter is float16 or float8. Elements that overflowed are still NaN or inf.

    Raises:
        ValueError: when called, as `get_loss_scale_state`.
        TypeError: if ``fun`` is not a function that returns a floating-point scalar;
            when called, if ``jax.value_and_grad`` gets an ``nnx.Module``.

    Warns:
        UserWarning: if the loss is float16, in which a scale above 65504 is infinite;
            if ``fun`` returns a loss that `scale_loss`, or a product with the scale,
            has already scaled.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> def loss_fn(w):  # `jax.grad` returns 0
        ...     return 2.0**-30 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
        >>> state = ls.DynamicLossScale().init()
        >>> value, grads = ls.value_and_grad(loss_fn, state)(jnp.ones(2))
        >>> print(grads * 2.0**30)
        [1. 1.]
    """
    options = dict(argnums=argnums, holomorphic=holomorphic, allow_int=allow_int)
    at_scale = differentiate(fun, has_aux, value_and_grad, **options)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(
        *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> tuple[Output, Any]:
        # Read the state now: a Flax NNX optimizer changes in place.
        with using_scale(state, Note.SCALES, Note.DIVIDES) as used:
            output, grads = at_scale(used.state.loss_scale, *args, **kwargs)
        note_divided(grads, used)
        return output, grads

    return value_and_grad_fun


_value_and_grad = value_and_grad  # `grad` has an argument of this name


@advise_on_state
def grad(
    fun: Callable[Arguments, Any],
    state: Any,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    value_and_grad: Callable[..., Any] | None = None,
) -> Callable[Arguments, Any]:
    """Create a function that evaluates the gradients of a loss with loss scaling.

    Args:
        fun: the loss, as for `value_and_grad`.
        state: the state, as for `value_and_grad`.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to allow integer arguments.
        value_and_grad: the function that differentiates, as for `value_and_grad`.

    Returns:
        A function that returns the gradients, or (gradients, aux) if ``has_aux``.

    Raises:
        ValueError, TypeError: as `value_and_grad`.

    Warns:
        UserWarning: as `value_and_grad`.

    Examples:
        >>> import optax_lossscale as ls
        >>> ls.grad(lambda w: w**2, ls.DynamicLossScale().init())(3.0)
        Array(6., dtype=float32)
    """
    options = dict(argnums=argnums, holomorphic=holomorphic, allow_int=allow_int)
    value_and_grad_fun = _value_and_grad(
        fun, state, has_aux=has_aux, value_and_grad=value_and_grad, **options
    )

    @functools.wraps(fun, updated=())
    def grad_fun(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def differentiate(
    fun: Callable[..., Any],
    has_aux: bool,
    value_and_grad: Callable[..., Any] | None,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Create a function of a scale and the loss's arguments that differentiates it.

    It returns the output of the loss, a tuple if ``has_aux``, and unscaled gradients.
    """
    check_function("fun", fun, "It comes first: `value_and_grad(loss_fn, opt_state)`.")
    value_and_grad = value_and_grad or jax.value_and_grad
    advice = "Leave it out, or pass `nnx.value_and_grad` or another library's."
    check_function("value_and_grad", value_and_grad, advice)
    if getattr(value_and_grad, "__module__", "") == "optax_lossscale":
        raise TypeError(
            "`value_and_grad` must be a function that only differentiates, got "
            f"`ls.{value_and_grad.__name__}`, which also scales. {advice}"
        )
    argnums = options["argnums"]
    if isinstance(argnums, np.ndarray):
        argnums = jax.tree.map(int, argnums.tolist(), is_leaf=np.isscalar)
        options["argnums"] = argnums
    # Leave out defaults, 0 and False: functions of other libraries may not take these.
    chosen = {key: x for key, x in options.items() if x != 0}

    def at_scale(scale: jax.Array, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if value_and_grad is jax.value_and_grad:
            _check_arguments(argnums, args, kwargs)

        @wraps(fun)
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
            output = fun(*with_finite_overwrites(args), **kwargs)
            # Nothing uses the scaled loss, only its derivative, so XLA removes it.
            if not has_aux:
                return scale_loss_by(output, scale), _Output(output)
            if not (isinstance(output, tuple | list) and len(output) == 2):
                raise TypeError(
                    "`fun` must return a pair (loss, aux) with has_aux=True, got "
                    f"{describe(output)}. Return a pair, or leave out `has_aux`."
                )
            return scale_loss_by(output[0], scale), _Output(tuple(output))

        scaled_value_and_grad = value_and_grad(scaled_fun, has_aux=True, **chosen)
        match scaled_value_and_grad(*args, **kwargs):
            case ((_, _Output(output)), scaled_grads):
                return output, unscale(scaled_grads, scale)
        raise TypeError(
            "`value_and_grad` must return ((loss, aux), gradients) with has_aux=True, "
            f"got {describe(value_and_grad)}. Pass `jax.value_and_grad`, "
            "`nnx.value_and_grad` or `eqx.filter_value_and_grad`, also to `grad`."
        )

    return at_scale


def _check_arguments(argnums: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Raise if jax cannot differentiate the arguments, or would lose their changes."""
    numbers = argnums if isinstance(argnums, tuple | list) else [argnums]
    # jax refuses others, such as an `nnx.DiffState`, itself.
    chosen = {i if i >= 0 else i + len(args) for i in numbers if isinstance(i, int)}
    differentiated = {i: x for i, x in enumerate(args) if i in chosen}
    others = [x for i, x in enumerate(args) if i not in chosen]
    check_no_modules(differentiated, (others, kwargs))
    for path, x in jax.tree.leaves_with_path(differentiated):
        if callable(x):
            raise TypeError(
                "`value_and_grad` must be a function that differentiates only arrays, "
                f"got `jax.value_and_grad` for {describe(x)} at argument "
                f"{path[0].key}{jax.tree_util.keystr(path[1:])}. For an Equinox "
                "module, pass `value_and_grad=eqx.filter_value_and_grad`."
            )
