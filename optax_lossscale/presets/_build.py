"""Build a rule from another system's arguments, and speak of them by their names."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from .._backoff import NUMBERS
from .._dynamic import DynamicLossScale
from .._loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale
from .._validation import check_number
from .._verbatim import VerbatimLossScale


@contextlib.contextmanager
def named(**names: str) -> Iterator[None]:
    """Let errors name the arguments that the user gave, not ours."""
    try:
        yield
    except ValueError as error:
        ours = "|".join(names)
        text = re.sub(rf"\b({ours})\b", lambda match: names[match[1]], str(error))
        raise ValueError(text) from None


def growing(
    *, min_scale: Any = 0.0, max_scale: Any = math.inf, **arguments: Any
) -> LossScale:
    """Return a `DynamicLossScale`, if one takes the course that these arguments mean.

    It does not if it would have to start outside of its limits. A floor of 0 and a
    ceiling of infinity become ours.
    """
    rule = VerbatimLossScale(
        min_scale=floor("min_scale", min_scale),
        max_scale=ceiling("max_scale", max_scale),
        **arguments,
    )
    quirks = rule.first_growth_late or rule.scale_dtype != "float32"
    if quirks or not rule.min_scale <= rule.init_scale <= rule.max_scale:
        return rule
    names = {field.name for field in dataclasses.fields(DynamicLossScale)}
    return DynamicLossScale(**{name: getattr(rule, name) for name in names})


def first(name: str, value: Any) -> float:
    """Return a first scale."""
    return check_number(name, value, *NUMBERS["init_scale"])


def floor(name: str, value: Any) -> float:
    """Return a least scale, 2**-126 where another system goes down to less."""
    number = check_number(
        name,
        value,
        lambda x: 0 <= x <= LARGEST_SCALE,
        "a number from 0 to 2**126",
        "It is the least loss scale; 1 is usual.",
    )
    return max(number, SMALLEST_SCALE)


def ceiling(name: str, value: Any) -> float:
    """Return a largest scale, 2**126 where another system goes up to more."""
    number = check_number(
        name,
        value,
        lambda x: x >= SMALLEST_SCALE,
        "a number from 2**-126",
        "It is the largest loss scale; 2.0**24 is usual.",
    )
    return min(number, LARGEST_SCALE)


def reciprocal(name: str, factor: Any) -> float:
    """Return the backoff factor of a system that divides by its growth factor."""
    factor = check_number(
        name,
        factor,
        lambda x: 1 < x <= LARGEST_SCALE,
        "a number above 1, up to 2**126",
        "It multiplies the loss scale in a growth and divides it in a backoff.",
    )
    return 1 / factor
