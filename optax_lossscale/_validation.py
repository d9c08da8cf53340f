"""Checks of the arguments that users pass. Each error says what to do instead."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_number(
    name: str, value: Any, accepts: Callable[[float], bool], rule: str, advice: str
) -> float:
    """Return ``value`` as a Python float, or unchanged if it is traced.

    It must also be accepted in float32, which devices use: there 1 - 1e-9 is 1.
    """
    if isinstance(value, jax.core.Tracer):
        return value  # type: ignore[return-value]  # inject_hyperparams traces it
    number = _as_python_number(value)
    # A NaN fails every comparison, so ``accepts`` refuses it.
    if number is None or not accepts(number):
        raise ValueError(f"`{name}` must be {rule}, got {value!r}. {advice}")
    with np.errstate(all="ignore"):
        rounded = float(np.float32(number))
    if not accepts(rounded):
        raise ValueError(
            f"`{name}` must be {rule}, got {value!r}, which is {rounded!r} in float32. "
            f"{advice}"
        )
    return number


def check_count(name: str, value: Any, advice: str, least: int = 1) -> int:
    """Return ``value`` as a Python int that fits int32, or unchanged if traced."""
    if isinstance(value, jax.core.Tracer):
        return value  # type: ignore[return-value]  # as above
    largest = np.iinfo(np.int32).max
    number = _as_python_number(value)
    if number is None or not (least <= number <= largest and number.is_integer()):
        raise ValueError(
            f"`{name}` must be a whole number from {least} to {largest}, got "
            f"{value!r}. {advice}"
        )
    return int(number)


def check_bool(name: str, value: Any, advice: str) -> None:
    """Raise if ``value`` is not Python's True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}. {advice}")


def check_flag(name: str, value: Any) -> None:
    """Raise if ``value`` is not one boolean, from Python or on the device."""
    on_device = getattr(value, "dtype", None) == jnp.bool_ and jnp.shape(value) == ()
    if not isinstance(value, bool) and not on_device:
        raise ValueError(
            f"`{name}` must be one boolean of shape (), got {describe(value)}. "
            "`all_finite(grads)` returns one for a tree of gradients. For an ensemble "
            "with one flag per member, call this inside `jax.vmap`."
        )


def check_concrete(name: str, tree: Any, advice: str) -> None:
    """Raise if a leaf of ``tree`` is being traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise ValueError(
            f"`{name}` must hold concrete numbers, got a traced value. {advice}"
        )


def check_magnitude(name: str, value: Any) -> None:
    """Raise if ``value`` is not one real number, from Python or on the device."""
    _check_one_number(
        name, value, "`max_magnitude(grads)` returns one for a tree of gradients."
    )


def check_value(value: Any) -> None:
    """Raise if ``value`` is not one loss."""
    _check_one_number(
        "value",
        value,
        "It is the unscaled loss. Pass its mean, or call this inside `jax.vmap` for an "
        "ensemble.",
    )


def _check_one_number(name: str, value: Any, advice: str) -> None:
    number = isinstance(value, int | float) or hasattr(value, "dtype")
    if (
        isinstance(value, bool)
        or not number
        or not _is_real(getattr(value, "dtype", jnp.result_type(float)))
        or jnp.shape(value) != ()
    ):
        raise ValueError(
            f"`{name}` must be one real number of shape (), got {describe(value)}. "
            f"{advice}"
        )


def check_scale(name: str, value: Any) -> None:
    """Raise if ``value`` is not one scale, without waiting for the device."""
    advice = (
        "It is the scale that multiplied the loss: `get_loss_scale(state)` returns it."
    )
    if not isinstance(value, jax.Array):
        check_number(
            name, value, lambda x: 0 < x < math.inf, "one number above 0", advice
        )
    elif value.shape != () or not _is_real(value.dtype):
        raise ValueError(
            f"`{name}` must be one number above 0, got {describe(value)}. {advice}"
        )


def check_float_dtype(name: str, value: Any, advice: str) -> np.dtype[Any]:
    """Return a floating-point type, passed as a type or as its name."""
    try:
        dtype = jnp.dtype("" if value is None else value)  # None means float64
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype
    except TypeError:
        pass
    raise ValueError(
        f"`{name}` must be a floating-point type or its name, got {value!r}. {advice}"
    )


def describe(value: Any) -> str:
    """Describe a value for an error: its repr, or the type and shape of an array."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"a jax.ShapeDtypeStruct of dtype {value.dtype}, which holds no number"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"


def _as_python_number(value: Any) -> float | None:
    """Return a real number as a Python float, and None for bools and all else."""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    dtype = getattr(value, "dtype", None)
    if dtype is None or jnp.shape(value) != () or not isinstance(dtype, np.dtype):
        return None
    # The transfer is explicit, because a transfer guard may forbid implicit ones.
    return float(jax.device_get(value).item()) if _is_real(dtype) else None


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
