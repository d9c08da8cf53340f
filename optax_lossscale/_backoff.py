"""What the rules that grow and back off have in common: arguments and trackers."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale
from ._state import LossScaleState
from ._validation import check_count, check_number

Numbers = Mapping[str, tuple[Callable[[float], bool], str, str]]
REFILLS = ("finite", "growth", "change")


def _is_scale(x: float) -> bool:
    return SMALLEST_SCALE <= x <= LARGEST_SCALE


# What each number accepts, the same in words, and the way out of an error.
NUMBERS: Numbers = {
    "init_scale": (
        _is_scale,
        "a number from 2**-126 to 2**126",
        "It is the first loss scale; 2.0**15 suits float16.",
    ),
    "growth_factor": (
        lambda x: 1 < x <= LARGEST_SCALE,
        "a number above 1, up to 2**126",
        "It multiplies the loss scale after `growth_interval` finite steps; to keep "
        "the scale from growing, set `max_scale` to `init_scale`.",
    ),
    "backoff_factor": (
        lambda x: 0 < x < 1,
        "in (0, 1)",
        "It multiplies the loss scale after non-finite gradients; to keep the scale "
        "from backing off, set `min_scale` to `init_scale`.",
    ),
    "min_scale": (
        _is_scale,
        "a number from 2**-126 to 2**126",
        "It is the least the loss scale backs off to; 1 is usual.",
    ),
    "max_scale": (
        _is_scale,
        "a number from 2**-126 to 2**126",
        "It is the most the loss scale grows to; 2.0**24 is usual.",
    ),
}
COUNTS: Mapping[str, str] = {
    "growth_interval": "It is how many finite steps in a row make the loss scale grow.",
    "hysteresis": "It is how many non-finite steps it takes to lower the loss scale; "
    "1 lowers it at once.",
}


def check_fields(
    rule: LossScale, numbers: Numbers = NUMBERS, counts: Mapping[str, str] = COUNTS
) -> None:
    """Check those fields of a frozen rule that the tables name, and settle them.

    Numbers become Python's own, so that equal rules are equal and JSON holds them.
    """
    for field in dataclasses.fields(rule):  # type: ignore[arg-type]
        name, value = field.name, getattr(rule, field.name)
        if name in numbers:
            value = check_number(name, value, *numbers[name])
        elif name in counts:
            value = check_count(name, value, counts[name])
        elif name == "hysteresis_refill" and value not in REFILLS:
            raise ValueError(
                f"`hysteresis_refill` must be one of {REFILLS}, got {value!r}. It says "
                "when the allowance of `hysteresis` non-finite steps is full again."
            )
        object.__setattr__(rule, name, value)


def check_order(rule: LossScale, *names: str) -> None:
    """Check that fields do not decrease, as far as they are not traced."""
    for lower, upper in itertools.pairwise(names):
        low, high = getattr(rule, lower), getattr(rule, upper)
        if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
            continue
        if low > high:
            raise ValueError(
                f"`{lower}` must not exceed `{upper}`, got {lower}={low!r} and "
                f"{upper}={high!r}. Lower `{lower}` or raise `{upper}`."
            )


def float32(rule: LossScale, *names: str) -> tuple[jax.Array, ...]:
    """Return fields as arrays: traced by inject_hyperparams they come in any dtype."""
    return tuple(jnp.asarray(getattr(rule, name), jnp.float32) for name in names)


def normal(scale: jax.Array, otherwise: Any) -> jax.Array:
    """Return a loaded scale with a normal reciprocal; ``otherwise`` if it is NaN."""
    scale = jnp.where(jnp.isnan(scale), jnp.asarray(otherwise, jnp.float32), scale)
    return jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return the scale 2**floor(exponent), which ``jnp.exp2`` does not give exactly."""
    lowest, highest = math.log2(SMALLEST_SCALE), math.log2(LARGEST_SCALE)
    whole = jnp.clip(jnp.floor(exponent), lowest, highest).astype(jnp.int32)
    return jnp.ldexp(jnp.ones((), jnp.float32), whole)


class Change(NamedTuple):
    """What a step does to the scale: at most one of the two is True."""

    grows: jax.Array
    backs_off: jax.Array


def backed_off(rule: Any, scale: jax.Array) -> jax.Array:
    """Return a scale after a backoff, which never raises it, wherever it was."""
    minimum, maximum = float32(rule, "min_scale", "max_scale")
    (backoff,) = float32(rule, "backoff_factor")
    return jnp.minimum(scale, jnp.clip(scale * backoff, minimum, maximum))


def moved(rule: Any, state: LossScaleState, change: Change) -> jax.Array:
    """Return the scale after a step, inside the limits if they allow it.

    A growth never lowers a scale and a backoff never raises one, wherever it was.
    """
    minimum, maximum = float32(rule, "min_scale", "max_scale")
    (growth,) = float32(rule, "growth_factor")
    scale = normal(state.loss_scale, rule.init_scale)
    grown = jnp.maximum(scale, jnp.clip(scale * growth, minimum, maximum))
    kept = jnp.clip(scale, minimum, maximum)
    scale = jnp.where(change.backs_off, backed_off(rule, scale), kept)
    return jnp.where(change.grows, grown, scale)


def advance(
    rule: Any, state: LossScaleState, grads_finite: Any, restart: int = 0
) -> tuple[LossScaleState, Change]:
    """Return the state with all but the scale brought up to date, and what is due.

    ``restart`` is where the growth tracker begins again after a non-finite step.
    """
    state = state.record(grads_finite)
    grads_finite = state.grads_finite
    interval, allowance = (
        jnp.asarray(x, jnp.int32) for x in (rule.growth_interval, rule.hysteresis)
    )

    # A checkpoint may hold any counters.
    growth_tracker = optax.safe_increment(jnp.maximum(state.growth_tracker, restart))
    grows = grads_finite & (growth_tracker >= interval)
    growth_tracker = jnp.where(grows, 0, growth_tracker)

    hysteresis_tracker = jnp.clip(state.hysteresis_tracker, 0, allowance)
    left = jnp.maximum(hysteresis_tracker - 1, 0)
    backs_off = ~grads_finite & (left == 0)
    refills = {
        "finite": grads_finite,
        "growth": grows,
        "change": grows | backs_off,
    }[rule.hysteresis_refill]
    hysteresis_tracker = jnp.where(grads_finite, hysteresis_tracker, left)
    new_state = state._replace(
        growth_tracker=jnp.where(grads_finite, growth_tracker, restart),
        hysteresis_tracker=jnp.where(refills, allowance, hysteresis_tracker),
    )
    return new_state, Change(grows, backs_off)
