"""Checks of the arguments that users pass. Each error says what to do instead."""

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._precision import LARGEST_SCALE, SMALLEST_SCALE, Limits, limits_of

AxisName = Hashable | tuple[Hashable, ...]


def check(argument: str, value: Any, name: str = "") -> Any:
    """Return the value of an argument as a plain Python value, or raise.

    ``argument`` is an entry of the table at the end of this file. ``name`` is what the
    user calls it, if that is something else.
    """
    return _ARGUMENTS[argument](name or argument, value)


def check_number(
    name: str, value: Any, accepts: Callable[[float], bool], rule: str, advice: str
) -> float:
    """Return ``value`` as a Python float.

    It must also be accepted in float32, which devices use: there 1 - 1e-9 is 1.
    """
    number = _as_python_number(name, value)
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


def check_normal_scale(name: str, value: Any, advice: str) -> float:
    """Return a scale whose float32 reciprocal is a normal number, too."""
    return check_number(
        name,
        value,
        lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE,
        "a number from 2**-126 to 2**126",
        advice,
    )


def check_count(name: str, value: Any, advice: str, least: int = 1) -> int:
    """Return ``value`` as a Python int that fits int32."""
    largest = np.iinfo(np.int32).max
    number = _as_python_number(name, value)
    if number is None or not (least <= number <= largest and number.is_integer()):
        raise ValueError(
            f"`{name}` must be a whole number from {least} to {largest}, got "
            f"{value!r}. {advice}"
        )
    return int(number)


def check_bool(name: str, value: Any, advice: str) -> bool:
    """Return ``value``, or raise if it is not Python's True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}. {advice}")
    return value


def check_function(name: str, value: Any, rule: str, advice: str) -> Any:
    """Return ``value``, or raise if it cannot be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be {rule}, got {describe(value)}. {advice}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str], advice: str) -> str:
    """Return ``value``, or raise if it is none of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {choices}, got {value!r}. {advice}")
    return str(value)


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


def check_fits(path: Any, value: Any) -> None:
    """Raise if an integer from Python or NumPy would wrap in the type JAX gives it."""
    if not isinstance(value, int | np.ndarray | np.generic):
        return
    array = np.ravel(value)
    if np.issubdtype(array.dtype, np.integer):
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        lost = array[array.astype(dtype) != array]
        if lost.size:
            raise ValueError(
                f"Integers must fit {dtype} without `jax_enable_x64`, got {lost[0]} at "
                f"{jax.tree_util.keystr(path) or 'the root'}. Count in larger units, "
                "or choose in Python: `new if was_applied(state) else old`."
            )


def check_concrete(name: str, tree: Any, advice: str) -> None:
    """Raise if a leaf of ``tree`` is being traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise ValueError(
            f"`{name}` must hold concrete numbers, got a traced value. {advice}"
        )


def check_series(
    name: str, values: Any, accepts: Callable[[Any], Any], rule: str, advice: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a one-dimensional array of numbers or booleans, in float64."""
    array = np.asarray(values)
    if array.ndim == 1 and (array.dtype == bool or _is_real(array.dtype)):
        numbers = array.astype(np.float64)
        if np.all(accepts(numbers)):
            return numbers
    raise ValueError(f"`{name}` must be {rule}, got {describe(values)}. {advice}")


def check_real(name: str, value: Any, advice: str) -> None:
    """Raise if ``value`` is not one real number, from Python or on the device."""
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


def check_limits(dtype: Any) -> Limits:
    """Return the limits of the type in which gradients are computed."""
    advice = 'It is the type that gradients are computed in, usually "float16".'
    return limits_of(check_float_dtype("dtype", dtype, advice).name)


def check_axis_name(axis_name: AxisName) -> None:
    """Raise if a name, or one in a tuple of names, is not bound here."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        # An integer would name an axis of the array. Only the psum of a Python number
        # fails in the same way in all kinds of mapped functions.
        if all(not isinstance(name, int) for name in names):
            jax.lax.psum(1, axis_name)
            return
        unbound = None
    except NameError as error:
        unbound = error
    raise ValueError(
        "`axis_name` must name an axis of the surrounding `shard_map`, `pmap` or "
        f"`vmap(axis_name=...)`, got {axis_name!r}. Under plain `jit`, leave it "
        "out: arrays are global there, and so is the check."
    ) from unbound


def describe(value: Any) -> str:
    """Describe a value for an error: its repr, or the type and shape of an array."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"a jax.ShapeDtypeStruct of dtype {value.dtype}, which holds no number"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"


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


def _number(
    accepts: Callable[[float], bool], rule: str, advice: str
) -> Callable[[str, Any], float]:
    return functools.partial(check_number, accepts=accepts, rule=rule, advice=advice)


def _normal(advice: str) -> Callable[[str, Any], float]:
    return functools.partial(check_normal_scale, advice=advice)


def _share(advice: str) -> Callable[[str, Any], float]:
    return _number(lambda x: 0 < x < 1, "in (0, 1)", advice)


def _count(advice: str, least: int = 1) -> Callable[[str, Any], int]:
    return functools.partial(check_count, advice=advice, least=least)


def _switch(advice: str) -> Callable[[str, Any], bool]:
    return functools.partial(check_bool, advice=advice)


def _choice(choices: Sequence[str], advice: str) -> Callable[[str, Any], str]:
    return functools.partial(check_choice, choices=choices, advice=advice)


_COMPILED_IN = "It decides how the step is compiled, so it cannot be an array."
SCALE_DTYPES = ("float32", "bfloat16", "float16")
_QUIRK = "It is a quirk of another system; leave it out in a new run."

# The arguments of rules, and those that several functions share.
_ARGUMENTS: dict[str, Callable[[str, Any], Any]] = {
    "loss_scale": _number(
        lambda x: 1 <= x <= LARGEST_SCALE,
        "a number from 1 to 2**126",
        "It multiplies the loss, and 1 leaves it unchanged.",
    ),
    "init_scale": _normal("It is the first loss scale; 2.0**15 suits float16."),
    "min_scale": _normal("It is the smallest loss scale; 1 is usual."),
    "max_scale": _normal("It is the largest loss scale; 2.0**24 is usual."),
    "growth_factor": _number(
        lambda x: 1 < x <= LARGEST_SCALE,
        "a number above 1, up to 2**126",
        "It multiplies the loss scale after enough finite steps in a row; 2 is usual.",
    ),
    "backoff_factor": _share(
        "It multiplies the loss scale after non-finite gradients; 0.5 is usual."
    ),
    "growth_interval": _count(
        "It is how many finite steps in a row raise the loss scale."
    ),
    "hysteresis": _count(
        "It is how many non-finite steps it takes to lower the loss scale; 1 lowers it "
        "at the first."
    ),
    "hysteresis_refill": _choice(
        ("finite", "growth", "change"), "It decides what resets the hysteresis counter."
    ),
    "tolerance": _number(
        lambda x: 0 <= x <= 1,
        "a number from 0 to 1",
        "It is a share of steps; 0 backs off at every overflow.",
    ),
    "interval_follows_scale": _switch(_COMPILED_IN),
    "headroom": _number(
        lambda x: 0 <= x <= 126,
        "a number from 0 to 126",
        "It is how many octaves to leave free below overflow; 3 is usual.",
    ),
    "dtype": lambda name, value: (
        check_float_dtype(
            name,
            value,
            'It is the type in which gradients overflow, usually "float16".',
        ).name
    ),
    "half_life": _count("It is how many steps halve a remembered maximum."),
    "log_max": _number(
        lambda x: -126 <= x <= 128,
        "a number from -126 to 128",
        "It is log2 of the magnitude at which gradients overflow; for float16 use 16.",
    ),
    "beta1": _share("It is the decay of an average."),
    "beta2": _share("It is the decay of an average."),
    "overflow_std_dev": _number(
        lambda x: 0 <= x <= 100,
        "a number from 0 to 100",
        "It is how many standard deviations to leave free below overflow; with 3.09, "
        "one step in a thousand overflows.",
    ),
    "nonfinite_log": _number(
        lambda x: -126 <= x <= 2.0**16,
        "a number from -126 to 65536",
        "It is the log2 that a non-finite step counts as.",
    ),
    "power_of_two": _switch(_COMPILED_IN),
    "skip_nonfinite": _switch(_COMPILED_IN),
    "first_growth_late": _switch(_QUIRK),
    "clips_every_step": _switch(_QUIRK),
    "scale_dtype": _choice(
        SCALE_DTYPES,
        "It is the name of the type to which the scale is rounded.",
    ),
    "max_magnitude": functools.partial(
        check_real,
        advice="`max_magnitude(grads)` returns one for a tree of gradients.",
    ),
    "value": functools.partial(
        check_real,
        advice="It is the unscaled loss. Pass its mean, or call this inside `jax.vmap` "
        "for an ensemble.",
    ),
    # Arguments of presets. A limit may be beyond ours, and is moved to it.
    "floor": _number(
        lambda x: 0 <= x <= LARGEST_SCALE,
        "a number from 0 to 2**126",
        "It is the smallest loss scale; 1 is usual.",
    ),
    "ceiling": _number(
        lambda x: x >= SMALLEST_SCALE,
        "a number from 2**-126",
        "It is the largest loss scale; 2.0**24 is usual.",
    ),
    "initial_scale_power": _number(
        lambda x: -126 <= x <= 126,
        "a number from -126 to 126",
        "It is log2 of the first scale; 16 is usual.",
    ),
    "log_max_of_float16": _number(
        lambda x: -126 <= x <= 16,
        "a number from -126 to 16",
        "It is the log2 that a non-finite step is meant to count as; 16 is usual.",
    ),
    "max_consecutive_skips": _count("It is how many steps in a row may be skipped."),
    "every": _count("It is the number of skipped steps between two reports."),
    "limit": _count("It is the largest number of arrays to show."),
    "loss_fn": functools.partial(
        check_function,
        rule="a function that returns a loss",
        advice="Pass the function itself: `value_and_grad(loss_fn, opt_state)(params, "
        "batch)`.",
    ),
    "value_and_grad": functools.partial(
        check_function,
        rule="a function that differentiates",
        advice="Pass a function such as `jax.value_and_grad`, "
        "`flax.nnx.value_and_grad` or `equinox.filter_value_and_grad`.",
    ),
    "block": functools.partial(
        check_function,
        rule="a function",
        advice="Pass the function itself: `scale_backward(layer)(params, x)`.",
    ),
    "max_retries": _count("It is how many times a step may be retried.", least=0),
}
