"""Checks of what users pass in; each error says what to do instead."""

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
    """Return ``value`` as a Python float, or as it is while it is traced.

    What counts is the float32 that devices compute with: there 1 - 1e-9 is 1.
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
    """Return ``value`` as a Python int that fits a counter, or as it is if traced."""
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
    """Refuse anything but Python's own True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}. {advice}")


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but one boolean, on the device or in Python."""
    on_device = getattr(value, "dtype", None) == jnp.bool_ and jnp.shape(value) == ()
    if not isinstance(value, bool) and not on_device:
        raise ValueError(
            f"`{name}` must be one boolean of shape (), got {describe(value)}. "
            "`all_finite(grads)` makes one of a tree of gradients; for an ensemble "
            "with a flag each, call this inside `jax.vmap`."
        )


def check_concrete(name: str, tree: Any, advice: str) -> None:
    """Refuse a tree in which something is being traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise ValueError(
            f"`{name}` must hold numbers, got something that is being traced. {advice}"
        )


def check_magnitude(name: str, value: Any) -> None:
    """Refuse anything but one real number, on the device or in Python."""
    _check_one_number(
        name, value, "`max_magnitude(grads)` makes one of a tree of gradients."
    )


def check_value(value: Any) -> None:
    """Refuse anything but one loss."""
    _check_one_number(
        "value",
        value,
        "It is the unscaled loss: pass its mean, or for an ensemble call this inside "
        "`jax.vmap`.",
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
    """Refuse anything but one scale; one on the device is not waited for."""
    advice = (
        "It is what the loss was multiplied by: `get_loss_scale(state)` returns it."
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
    """Return a floating-point type that is given as such or by its name."""
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
    """Name a value in an error: its repr, or for an array its type and shape."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"a jax.ShapeDtypeStruct of dtype {value.dtype}, which holds no number"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"


def _as_python_number(value: Any) -> float | None:
    """Return a real number as Python's own, None for bools and everything else."""
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
    # Fetched as such: a transfer guard may forbid what happens without being asked for.
    return float(jax.device_get(value).item()) if _is_real(dtype) else None


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
