"""A guard that detects, on the host or in a compiled loop, that training stopped."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._axes import AxisName, check_axis_name
from .._dtypes import is_inexact
from .._find import find_state, get_loss_scale_state
from .._finite import all_finite, none_is_true
from .._state import MOST_COUNTED_SKIPS, LossScaleState
from .._validation import check_count, check_function, check_loss, is_traced, warn
from .gradient_report import check_gradients, gradient_report
from .stop_message import ERRORS, Event, message

# The largest scale of the default rule: if a scale is there for long without a skip,
# nothing overflows at any scale.
_HIGHEST_SCALE, _LONG = 2.0**24, 500
# A start from the default rule's largest scale skips 38 steps on its way to 2**-14, its
# smallest, and raises the rate to 0.22. If the rule then grows every 20 steps, it skips
# 22 more until the rate has fallen again.
_FIRST_SKIPS = 60
# A scale that falls from Megatron's 2**32 to 2**-14, with its hysteresis, skips 47.
_LONGEST_SEARCH = 50
# After a skip, the average is up to 0.005 above the share of skipped steps. A rule
# that works well and grows every 20 steps skips 1/21.
_WARNING_RATE, _ERROR_RATE = 0.055, 0.25
# Gradients that have become 2**10 times as large raise the rate by this much while the
# rule finds its scale again.
_SEARCH_RATE = 0.1


class LossScaleError(RuntimeError):
    """Raised by `check_loss_scale` if too many steps are skipped.

    The message shows the call of `nonfinite_report` that finds the cause, and links to
    the page with the fixes.

    Examples:
        >>> import optax_lossscale as ls
        >>> issubclass(ls.LossScaleError, RuntimeError)
        True
    """


def check_loss_scale(
    state: Any,
    *,
    max_consecutive_skips: int = 100,
    every: int = 1,
    grads: Any = None,
    value: Any = None,
    on_error: Callable[[LossScaleError], None] | None = None,
    axis_name: AxisName | None = None,
) -> None:
    """Raise an error if training has stopped, because too many steps are skipped.

    The error shows the numbers and how to find the cause. Call this where you log: it
    waits for the device. Or call it in a compiled loop. In compiled code, an error ends
    the program with a ``jax.errors.JaxRuntimeError`` that quotes the `LossScaleError`,
    and the results of the program are lost. To keep them, pass ``on_error``.

    It warns

    - if no step was ever skipped, the scale is 2**24 or more, and ``growth_tracker`` is
      500 or more;
    - if more than 50 steps in a row are skipped, and the scale is not fixed;
    - if more than 5% of the recent steps are skipped, and more than 60 in all. While
      the rule may be searching for its scale, the limit is 10%;
    - if ``grads`` or ``value`` are not finite, but the step counts as applied. This
      means that the step ignores the result of ``update``, or that ``update`` did not
      get ``value``. With a fixed scale, ``grads`` are checked only after a first skip;
    - if ``grads`` are all exactly 0, but ``value`` is not.

    Args:
        state: the optimizer state after the update, as for `get_loss_scale_state`. An
            error names the arrays in it that are not finite.
        max_consecutive_skips: how many steps in a row may be skipped; with 0, the first
            skip is an error.
        every: the number of skipped steps between two errors, 1 or more.
        grads: the gradients of this step. An error shows their `gradient_report`.
        value: the unscaled loss of this step, which an error shows: if it is finite,
            the fault is in the backward pass.
        on_error: a function that is called on the host with the `LossScaleError`,
            instead of raising it.
        axis_name: the mapped axis, or a tuple of them, along which the state is the
            same everywhere. Only the first device along it calls the host.

    Raises:
        LossScaleError: if more than ``max_consecutive_skips`` steps in a row are
            skipped; if ``skip_rate``, the recent share of skipped steps, is above 1/4;
            if the scale is not a positive number.
        ValueError: as `get_loss_scale_state`, or if an argument is not as described.
        TypeError: if ``on_error`` is not a function.

    Examples:
        >>> import jax
        >>> import optax_lossscale as ls
        >>> rule, errors = ls.DynamicLossScale(), []
        >>> def step(state, flag):
        ...     state = rule.update(state, flag)
        ...     ls.check_loss_scale(
        ...         state, max_consecutive_skips=20, on_error=errors.append
        ...     )
        ...     return state, None
        >>> flags = jax.numpy.zeros(21, bool)
        >>> state, _ = jax.lax.scan(step, rule.init(), flags)
        >>> jax.effects_barrier()
        >>> print(errors[0])
        The last 21 steps were all skipped, ...
    """
    scale_state = get_loss_scale_state(state)
    advice = "It is how many steps in a row may be skipped."
    limit = check_count("max_consecutive_skips", max_consecutive_skips, advice, 0)
    advice = "It is the number of skipped steps between two errors."
    every = check_count("every", every, advice)
    check_gradients(grads)
    if on_error is not None:
        check_function("on_error", on_error, "Leave it out to raise the error.")
    check_loss(value)
    check_axis_name(axis_name)
    handle = functools.partial(_raise_or_warn, limit, on_error)
    scale_state, grads, value = jax.lax.stop_gradient((scale_state, grads, value))
    # In a traced function, this also traces a state that the function closes over.
    eager = not is_traced((scale_state, grads, value))

    def arrays() -> Any:
        scale = scale_state.loss_scale
        report = None if grads is None else gradient_report(grads, loss_scale=scale)
        leaves = jax.tree_util.tree_leaves_with_path(find_state(state))
        kept = {jax.tree_util.keystr(path): x for path, x in leaves if is_inexact(x)}
        return report, jax.tree.map(all_finite, jax.lax.stop_gradient(kept))

    inexact = list(filter(is_inexact, jax.tree.leaves(grads)))
    due = _is_due(scale_state, inexact, value, limit, every, eager)
    if eager:
        if (fetched := jax.device_get(due)).any():
            handle(fetched, scale_state, arrays(), value)
        return
    if axis_name is not None:
        due &= jax.lax.axis_index(axis_name) == 0
    jax.lax.cond(
        due.any(),
        lambda: jax.debug.callback(handle, due, scale_state, arrays(), value),
        lambda: None,
    )


def _raise_or_warn(limit: int, on_error: Any, due: np.ndarray, *seen: Any) -> None:
    """Raise or report, on the host, the events that are due."""
    # Under ``jax.vmap``, the host is called for each member, even if nothing is due:
    # https://github.com/jax-ml/jax/issues/19314
    for event, flags in zip(Event, due, strict=True):
        if not np.any(flags):
            continue
        text = message(event, limit, flags, *seen)
        if event not in ERRORS:
            warn(text)
        elif on_error is None:
            raise LossScaleError(text)
        else:
            on_error(LossScaleError(text))


class _Due(NamedTuple):
    """Whether an event has happened, and whether a compiled loop reports it now.

    A loop sees every step. It reports each skip once, and a lasting state every 500
    steps.
    """

    has_happened: jax.Array
    in_loop: jax.Array | bool = True


@functools.partial(jax.jit, static_argnames=("limit", "every", "eager"))
def _is_due(
    state: LossScaleState, grads: Any, value: Any, limit: int, every: int, eager: bool
) -> jax.Array:
    """Return whether each event is due, of each member of an ensemble."""
    scale, tracker = state.loss_scale, state.growth_tracker
    skipped, skips = state.skipped_steps, state.consecutive_skips
    is_valid = (scale > 0) & (scale < jnp.inf)
    is_at_ceiling = (scale >= _HIGHEST_SCALE) & (skipped == 0) & (tracker >= _LONG)
    is_beyond_limit = (skips > limit) & ((skips - limit - 1) % every == 0)
    is_nth_skip = skipped % every == 0
    # The rate of a dynamic scale does not count a long row, of which the limit decides.
    is_counted = state.is_fixed | (skips <= MOST_COUNTED_SKIPS)
    is_high_rate = (state.skip_rate > _ERROR_RATE) & is_counted & is_nth_skip
    is_high_rate &= skips <= limit
    is_long_row = (skips > _LONGEST_SEARCH) & (skips <= limit) & ~state.is_fixed
    events = {
        Event.NEVER_OVERFLOWED: _Due(is_at_ceiling, tracker % _LONG == 0),
        Event.OFTEN_SKIPPED: _Due(_is_often_skipped(state), (skips == 1) & is_nth_skip),
        Event.LONG_ROW: _Due(is_long_row, skips == _LONGEST_SEARCH + 1),
        Event.UPDATE_UNDONE: _Due(_is_undone(state, grads, value)),
        # The tracker is 1 in the first step that the rule counts.
        Event.ALL_ZERO: _Due(_is_all_zero(state, grads, value), tracker % _LONG == 1),
        Event.INVALID_SCALE: _Due(~is_valid),
        Event.SKIPS_IN_A_ROW: _Due(is_valid & is_beyond_limit),
        Event.HIGH_SKIP_RATE: _Due(is_valid & is_high_rate, skips > 0),
    }
    rows = [events[event] for event in Event]
    due = [x.has_happened if eager else x.has_happened & x.in_loop for x in rows]
    return jnp.stack(jnp.broadcast_arrays(*due))


def _is_undone(state: LossScaleState, grads: Any, value: Any) -> jax.Array:
    """Return whether gradients or loss are not finite, but the step is applied."""
    # The rule of a fixed scale may be one that never skips.
    may_skip = ~state.is_fixed | (state.skipped_steps > 0)
    is_undone = jnp.all(state.applied & may_skip) & ~all_finite(grads)
    return is_undone | (jnp.all(state.applied) & ~all_finite(value))


def _is_all_zero(state: LossScaleState, grads: Any, value: Any) -> jax.Array:
    """Return whether there are gradients, and all of them are exactly 0."""
    is_all_zero = jnp.all(state.applied) & none_is_true([x != 0 for x in grads])
    is_all_zero &= any(map(jnp.size, grads))
    # If the loss is 0, gradients of 0 are right.
    return is_all_zero if value is None else is_all_zero & (value != 0)


def _is_often_skipped(state: LossScaleState) -> jax.Array:
    """Return whether many steps are skipped, but not by a rule that seeks its scale."""
    rate, skips = state.skip_rate, state.consecutive_skips
    steps = state.growth_tracker.astype(jnp.float32)
    is_often = (rate > _WARNING_RATE) & (rate <= _ERROR_RATE) & (skips <= 1)
    is_often &= state.skipped_steps > _FIRST_SKIPS
    # No scale prevents a skip that leaves the tracker alone, or one at a low scale.
    is_found = (skips == 1) & (state.growth_tracker > 0) | (state.loss_scale <= 1)
    # Each skip of a search resets the tracker. The rate of that time has decayed.
    is_found |= rate > _WARNING_RATE + _ERROR_RATE * 0.99**steps
    return is_often & (is_found | state.is_fixed | (rate > _SEARCH_RATE))
