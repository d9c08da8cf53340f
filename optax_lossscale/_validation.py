"""Checks of the arguments that users pass, and warnings. Each names the fix."""

import functools
import inspect
import itertools
import numbers
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ._dtypes import LARGEST_SCALE, SMALLEST_SCALE

# The only place in the package with the address of the documentation. A release has
# its tag in place of `main`.
BOOK = "https://github.com/optax-lossscale/optax_lossscale/blob/main/notebooks/"

_POWERS = {SMALLEST_SCALE: "2**-126", LARGEST_SCALE: "2**126"}

# A warning points at the first line outside of these packages.
_SKIPPED = {__name__.partition(".")[0], "jax", "optax", "flax", "equinox", "contextlib"}

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
# The arguments and the output of a function that a user passes.
Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


def advise_on_call(advice: str) -> Callable[[FunctionT], FunctionT]:
    """Add advice to the error if a call of a function has other arguments."""

    def decorated(fun: FunctionT) -> FunctionT:
        signature = inspect.signature(fun)

        @functools.wraps(fun)
        def advising(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"`{fun.__name__}`: {error}. {advice}") from None
            return fun(*args, **kwargs)

        return cast(FunctionT, advising)

    return decorated


def check_number(
    name: str,
    value: Any,
    least: float,
    largest: float,
    advice: str,
    *,
    is_open: bool = False,
) -> float:
    """Return a number within bounds as a Python float, or raise.

    Open bounds are excluded, even after rounding to float32, in which rules compute.
    """
    number = _as_python_number(name, value)
    low, high = (_POWERS.get(x, f"{x:g}") for x in (least, largest))
    # A NaN fails every comparison.
    if is_open:
        bounds = f"in ({low}, {high}) in float32"
        is_inside = number is not None and least < float(np.float32(number)) < largest
    else:
        bounds = f"a number from {low} to {high}"
        is_inside = number is not None and least <= number <= largest
    if number is None or not is_inside:
        if hasattr(value, "loss_scale"):  # such as a SuggestedLossScale
            advice = "Pass its `.loss_scale`."
        raise ValueError(f"`{name}` must be {bounds}, got {value!r}. {advice}")
    return number


def check_count(name: str, value: Any, advice: str, least: int = 1) -> int:
    """Return a whole number that fits int32 as a Python int, or raise."""
    largest = np.iinfo(np.int32).max
    number = _as_python_number(name, value)
    if number is None or not (least <= number <= largest and number.is_integer()):
        raise ValueError(
            f"`{name}` must be a whole number from {least} to {largest}, got "
            f"{value!r}. {advice}"
        )
    return int(number)


def check_switch(name: str, value: Any, advice: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}. {advice}")
    return value


def check_names(name: str, value: Any, advice: str) -> None:
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(isinstance(x, str) and x for x in value):
        raise ValueError(
            f'`{name}` must be a list of names, such as ["router"], got {value!r}. '
            f"{advice}"
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...], advice: str) -> str:
    if value not in choices:
        *most, last = (f'"{x}"' for x in choices)
        raise ValueError(
            f"`{name}` must be {', '.join(most)} or {last}, got {value!r}. {advice}"
        )
    return str(value)


def check_function(name: str, value: Any, advice: str) -> None:
    if not callable(value) or isinstance(value, type):  # such as jnp.float16
        raise TypeError(f"`{name}` must be a function, got {describe(value)}. {advice}")


def check_dtype(name: str, value: Any) -> str:
    """Return the name of a floating-point dtype, passed as a dtype or as its name."""
    try:
        dtype = jnp.dtype("" if value is None else value)  # None means float64
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype.name
    except (TypeError, ValueError):  # NumPy's, of a dict of arrays
        pass
    like = "bfloat16" if "bf" in str(value) else "float16"
    raise ValueError(
        f'`{name}` must be a floating-point dtype or its name, such as "{like}", got '
        f"{value!r}."
    )


def check_scalar(name: str, value: Any, kind: str, advice: str) -> None:
    """Raise if this is not one boolean or real number, from Python or on the device."""
    dtype: Any = getattr(value, "dtype", None)
    if isinstance(value, int | float):
        dtype = jnp.result_type(value)
    elif isinstance(value, jax.ShapeDtypeStruct):
        dtype = None
    is_kind = jnp.issubdtype(dtype, jnp.bool_) if kind == "boolean" else _is_real(dtype)
    if dtype is None or not is_kind or jnp.shape(value) != ():
        raise ValueError(
            f"`{name}` must be one {kind} of shape (), got {describe(value)}. {advice}"
        )


def check_flag(name: str, value: Any) -> None:
    advice = "`all_finite(grads)` returns one for a tree of gradients. For an ensemble "
    advice += "with one flag per member, call this inside `jax.vmap`."
    check_scalar(name, value, "boolean", advice)


def check_loss(value: Any) -> None:
    advice = "It is the unscaled loss, which `value_and_grad` returns first: "
    advice += "`loss, grads = ...`. For an ensemble use `jax.vmap`."
    if value is not None:
        check_scalar("value", value, "real number", advice)


def check_scale(name: str, value: Any) -> None:
    """Raise if this is not one scale, without waiting for the device."""
    advice = "It is the scale that multiplied the loss: `get_loss_scale(state)`."
    if isinstance(value, jax.Array):
        check_scalar(name, value, "real number", advice)
    else:
        check_number(name, value, SMALLEST_SCALE, LARGEST_SCALE, advice)


def check_order(**numbers: float) -> None:
    """Raise if the arguments are not in ascending order."""
    for (lower, low), (upper, high) in itertools.pairwise(numbers.items()):
        if low > high:
            raise ValueError(
                f"`{lower}` must not exceed `{upper}`, got {lower}={low!r} and "
                f"{upper}={high!r}. Lower `{lower}` or raise `{upper}`."
            )


def check_concrete(name: str, tree: Any, advice: str) -> None:
    """Raise if a leaf of ``tree`` is being traced."""
    if is_traced(tree):
        raise ValueError(
            f"`{name}` must hold concrete numbers, got a traced value. {advice}"
        )


def is_traced(tree: Any) -> bool:
    """Return whether a leaf of ``tree`` is being traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def warn(message: str, page: str = "") -> None:
    """Warn at the line of the user, outside of this package and of its callers.

    ``page`` is the place in the documentation that explains more.
    """
    if page:
        message += f" {BOOK}{page}"
    level, frame = 1, sys._getframe()
    while frame.f_back and _package(frame.f_globals) in _SKIPPED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def describe(value: Any) -> str:
    """Describe a value for an error: its repr, its type, or the shape of an array."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"a jax.ShapeDtypeStruct of dtype {value.dtype}, which holds no number"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    text, cls = repr(value), type(value)
    home = sys.modules[__name__.partition(".")[0]]
    if cls.__module__ == home.__name__ and getattr(home, cls.__name__, cls) is not cls:
        return (
            f"a {cls.__name__} of an earlier import of {home.__name__}: restart Python"
        )
    return text if len(text) <= 80 else f"an object of type {type(value).__name__}"


def _as_python_number(name: str, value: Any) -> float | None:
    """Return a real number as a Python float, and None for bools and all else."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"`{name}` must be a plain number, got a traced value. Make it a static "
            "argument of `jax.jit`, as in `jax.jit(step, static_argnames=...)`."
        )
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # of an int
            return None
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or value.shape != ():
        return None
    # The transfer is explicit, because a transfer guard may forbid implicit ones.
    return float(jax.device_get(value).item()) if _is_real(value.dtype) else None


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _package(names: dict[str, object]) -> str:
    # Code that `exec` runs may have no ``__name__``.
    return str(names.get("__name__")).partition(".")[0]
