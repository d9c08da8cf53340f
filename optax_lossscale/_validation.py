"""Checks of the arguments that users pass. Each error says what to do instead."""

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._precision import LARGEST_SCALE, SMALLEST_SCALE


def check(argument: str, value: Any, name: str = "") -> Any:
    """Return the value of an argument as a plain Python value, or raise.

    ``argument`` is an entry of the table at the end of this file. ``name`` is what the
    user calls it, if that is something else.
    """
    kind, *rest = _ARGUMENTS[argument]
    return kind(name or argument, value, *rest)


def check_number(
    name: str, value: Any, accepts: Callable[[float], bool], rule: str, advice: str
) -> float:
    """Return ``value`` as a Python float."""
    number = _as_python_number(name, value)
    # A NaN fails every comparison, so ``accepts`` refuses it.
    if number is None or not accepts(number):
        raise ValueError(f"`{name}` must be {rule}, got {value!r}. {advice}")
    return number


def check_order(**numbers: float) -> None:
    """Raise if the arguments are not in ascending order."""
    for (lower, low), (upper, high) in itertools.pairwise(numbers.items()):
        if low > high:
            raise ValueError(
                f"`{lower}` must not exceed `{upper}`, got {lower}={low!r} and "
                f"{upper}={high!r}. Lower `{lower}` or raise `{upper}`."
            )


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


def describe(value: Any) -> str:
    """Describe a value for an error: its repr, its type, or the shape of an array."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"a jax.ShapeDtypeStruct of dtype {value.dtype}, which holds no number"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"an object of type {type(value).__name__}"


def _as_python_number(name: str, value: Any) -> float | None:
    """Return a real number as a Python float, and None for bools and all else."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"`{name}` must be a plain number, got a traced value. It is fixed when a "
            "step is compiled: `jax.jit` and `optax.inject_hyperparams` cannot pass "
            "it. To change a rule during training, continue with another one: "
            "`opt_state` carries over."
        )
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, numbers.Real):
        return float(value)
    dtype = getattr(value, "dtype", None)
    if dtype is None or jnp.shape(value) != () or not isinstance(dtype, np.dtype):
        return None
    # The transfer is explicit, because a transfer guard may forbid implicit ones.
    return float(jax.device_get(value).item()) if _is_real(dtype) else None


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _between(name: str, value: Any, least: float, largest: float, advice: str) -> float:
    ends = (_POWERS.get(x, f"{x:g}") for x in (least, largest))
    rule = f"a number from {' to '.join(ends)}"
    return check_number(name, value, lambda x: least <= x <= largest, rule, advice)


def _scale(name: str, value: Any, advice: str) -> float:
    """Return a scale whose float32 reciprocal is a normal number, too."""
    return _between(name, value, SMALLEST_SCALE, LARGEST_SCALE, advice)


def _share(name: str, value: Any, advice: str) -> float:
    return check_number(
        name,
        value,
        lambda x: 0 < float(np.float32(x)) < 1,
        "in (0, 1) in float32",
        advice,
    )


def _factor(name: str, value: Any, advice: str) -> float:
    rule = "a number above 1 in float32, up to 2**126"
    return check_number(
        name, value, lambda x: 1 < float(np.float32(x)) <= LARGEST_SCALE, rule, advice
    )


def _count(name: str, value: Any, advice: str, least: int = 1) -> int:
    """Return a Python int that fits int32."""
    largest = np.iinfo(np.int32).max
    number = _as_python_number(name, value)
    if number is None or not (least <= number <= largest and number.is_integer()):
        raise ValueError(
            f"`{name}` must be a whole number from {least} to {largest}, got "
            f"{value!r}. {advice}"
        )
    return int(number)


def _switch(name: str, value: Any, advice: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}. {advice}")
    return value


def _choice(name: str, value: Any, choices: Sequence[str], advice: str) -> str:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {choices}, got {value!r}. {advice}")
    return str(value)


def _true(name: str, value: Any, advice: str) -> None:
    if value is not True:
        raise ValueError(f"`{name}` must be True, got {value!r}. {advice}")


def _function(name: str, value: Any, advice: str) -> Any:
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, got {describe(value)}. {advice}")
    return value


def _dtype(name: str, value: Any, advice: str) -> str:
    """Return the name of a floating-point type, passed as a type or as its name."""
    try:
        dtype = jnp.dtype("" if value is None else value)  # None means float64
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype.name
    except TypeError:
        pass
    raise ValueError(
        f"`{name}` must be a floating-point type or its name, got {value!r}. {advice}"
    )


def _real(name: str, value: Any, advice: str) -> None:
    """Raise if this is not one real number, from Python or on the device."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, int | float):
        dtype = jnp.result_type(value)
    if dtype is None or not _is_real(dtype) or jnp.shape(value) != ():
        raise ValueError(
            f"`{name}` must be one real number of shape (), got {describe(value)}. "
            f"{advice}"
        )


_POWERS = {SMALLEST_SCALE: "2**-126", LARGEST_SCALE: "2**126"}
_COMPILED_IN = "It decides how the step is compiled, so it cannot be an array."
_QUIRK = "It is a quirk of another system; leave it out in a new run."
_REFILL = "It decides what resets the hysteresis counter."

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    # Of rules.
    "loss_scale": (_between, 1, LARGEST_SCALE, "1 leaves the loss unchanged."),
    "init_scale": (_scale, "It is the first loss scale; 2.0**15 suits float16."),
    "min_scale": (_scale, "It is the smallest loss scale; 1 is usual."),
    "max_scale": (_scale, "It is the largest loss scale; 2.0**24 is usual."),
    "growth_factor": (_factor, "It multiplies the scale if it grows; 2 is usual."),
    "backoff_factor": (_share, "It multiplies the scale at overflow; 0.5 is usual."),
    "growth_interval": (_count, "It is how many finite steps raise the scale."),
    "hysteresis": (_count, "It is how many non-finite steps it takes to back off."),
    "hysteresis_refill": (_choice, ("finite", "growth", "change"), _REFILL),
    "headroom": (_between, 0, 126, "It is how many octaves to leave free; 3 is usual."),
    "dtype": (_dtype, 'It is the type that gradients are in, usually "float16".'),
    "half_life": (_count, "It is how many steps halve a remembered maximum."),
    "skip_nonfinite": (_switch, _COMPILED_IN),
    "first_growth_late": (_switch, _QUIRK),
    "max_magnitude": (_real, "`max_magnitude(grads)` returns one for gradients."),
    # Of presets. A limit may be beyond ours, and is moved to it.
    "floor": (_between, 0, LARGEST_SCALE, "It is the smallest loss scale; 1 is usual."),
    "ceiling": (_between, SMALLEST_SCALE, math.inf, "It is the largest loss scale."),
    "factor": (_factor, "It multiplies and divides the scale; 2 is usual."),
    "constant_or_0": (_between, 0, LARGEST_SCALE, "0 is for a scale that changes."),
    "initial_scale_power": (_between, -126, 126, "It is log2 of the first scale."),
    "consecutive_hysteresis": (_switch, _REFILL),
    "raise_error_at_min_scale": (_switch, "It is ignored. Use `check_loss_scale`."),
    "enabled": (_switch, "It decides whether to scale the loss."),
    "dynamic": (_switch, "Pass a number as `initial_scale`."),
    "dynamic_of_keras": (
        _true,
        "For a scale that never changes, use `FixedLossScale`.",
    ),
    # Of functions.
    "check_updates": (_switch, "True also checks the results."),
    "value": (_real, "It is the unscaled loss. For an ensemble use `jax.vmap`."),
    "master_dtype": (_dtype, "It is the type of the master weights, usually float32."),
    "max_consecutive_skips": (_count, "It is how many steps in a row may be skipped."),
    "every": (_count, "It is the number of skipped steps between two reports."),
    "limit": (_count, "It is the largest number of arrays to show."),
    "max_retries": (_count, "It is how many times a step may be retried.", 0),
    "loss_fn": (_function, "It comes first: `value_and_grad(loss_fn, opt_state)`."),
    "value_and_grad": (_function, "Pass `nnx.value_and_grad` or another library's."),
    "on_error": (_function, "It gets a LossScaleError. Leave it out to raise that."),
    "block": (_function, "Pass it as in `scale_block(layer)`."),
}
