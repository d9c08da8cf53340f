"""Checks of the arguments that rules and presets share.

Checks of numbers return Python numbers, so that equal rules compare equal and a
configuration can be written as JSON. A value that ``optax.inject_hyperparams`` traces
is returned unchanged. ``name`` is what the user calls the argument.
"""

import itertools
from typing import Any

import jax

from .._precision import LARGEST_SCALE, SMALLEST_SCALE
from .._validation import check_count, check_number

REFILLS = ("finite", "growth", "change")


def settle(rule: Any, **fields: Any) -> None:
    """Set the fields of a frozen rule to their checked values.

    Remember which of them were given as arrays: see `compiled`.
    """
    arrays = {name for name in fields if _is_array(getattr(rule, name))}
    if arrays:
        object.__setattr__(rule, "_given_as_arrays", frozenset(arrays))
    for name, value in fields.items():
        object.__setattr__(rule, name, value)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def check_init_scale(value: Any, name: str = "init_scale") -> float:
    advice = "It is the first loss scale; 2.0**15 suits float16."
    return check_normal_scale(value, name, advice)


def check_min_scale(value: Any) -> float:
    advice = "It is the smallest loss scale; 1 is usual."
    return check_normal_scale(value, "min_scale", advice)


def check_max_scale(value: Any) -> float:
    advice = "It is the largest loss scale; 2.0**24 is usual."
    return check_normal_scale(value, "max_scale", advice)


def check_normal_scale(value: Any, name: str, advice: str) -> float:
    return check_number(
        name,
        value,
        lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE,
        "a number from 2**-126 to 2**126",
        advice,
    )


def check_fixed_scale(value: Any, name: str = "loss_scale") -> float:
    return check_number(
        name,
        value,
        lambda x: 1 <= x <= LARGEST_SCALE,
        "a number from 1 to 2**126",
        "It multiplies the loss. To turn scaling off, use 1.",
    )


def check_growth_factor(value: Any, name: str = "growth_factor") -> float:
    return check_number(
        name,
        value,
        lambda x: 1 < x <= LARGEST_SCALE,
        "a number above 1, up to 2**126",
        "It multiplies the loss scale after enough finite steps in a row; 2 is usual.",
    )


def check_backoff_factor(value: Any, name: str = "backoff_factor") -> float:
    return check_number(
        name,
        value,
        lambda x: 0 < x < 1,
        "in (0, 1)",
        "It multiplies the loss scale after non-finite gradients; 0.5 is usual.",
    )


def check_growth_interval(value: Any, name: str = "growth_interval") -> int:
    return check_count(
        name, value, "It is how many finite steps in a row raise the loss scale."
    )


def check_hysteresis(value: Any, name: str = "hysteresis") -> int:
    return check_count(
        name,
        value,
        "It is how many non-finite steps it takes to lower the loss scale; 1 lowers it "
        "at the first.",
    )


def check_hysteresis_refill(value: Any) -> None:
    if value not in REFILLS:
        raise ValueError(
            f"`hysteresis_refill` must be one of {REFILLS}, got {value!r}. It decides "
            "what resets the hysteresis counter."
        )


def check_order(**numbers: float) -> None:
    """Check that the arguments are in ascending order; traced ones are not checked."""
    for (lower, low), (upper, high) in itertools.pairwise(numbers.items()):
        if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
            continue
        if low > high:
            raise ValueError(
                f"`{lower}` must not exceed `{upper}`, got {lower}={low!r} and "
                f"{upper}={high!r}. Lower `{lower}` or raise `{upper}`."
            )
