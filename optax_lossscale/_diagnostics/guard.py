"""A guard that detects, on the host or in a compiled loop, that training stopped."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._devices import AxisName, check_axis_name
from .._find import get_loss_scale_state
from .._state import LossScaleState, check_state
from .._validation import check
from .._warn import warn
from .gradient_report import check_gradients, gradient_report
from .stop_message import WARNINGS, stop_message
from .table import GradientReport


class LossScaleError(RuntimeError):
    """Raised if training has stopped. The message lists causes, and ways out.

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
    on_error: Callable[[LossScaleError], None] | None = None,
    axis_name: AxisName | None = None,
) -> None:
    """Raise an error if training has stopped: too many steps were skipped.

    If every step is skipped, the loop runs on, but nothing is learned. Call this where
    you log, where it waits for the device, or in a compiled loop. There the device
    decides, and calls the host only if training has stopped. Without ``on_error``, the
    program then ends with a ``jax.errors.JaxRuntimeError`` that quotes the
    `LossScaleError`, and its results are lost.

    It warns

    - if no step was ever skipped, and the last 500 steps had a scale of 2**24 or more:
      the step does not call `value_and_grad`, or nothing computes in float16. It cannot
      tell if the scale grows sooner than that;
    - if the scale has fallen to 1, and more than 5 % of the steps are skipped of late:
      some batches are bad;
    - if the scale has fallen to 1, and the first skips are 20 or more in a row.

    Args:
        state: the optimizer state after the update, as for `get_loss_scale_state`.
        max_consecutive_skips: how many steps in a row may be skipped, 1 or more.
        every: the number of skipped steps between two errors, 1 or more.
        grads: the gradients of this step, to show their `gradient_report` in the error.
            The report is computed only for an error.
        on_error: called on the host with the `LossScaleError` instead of raising it.
        axis_name: the mapped axis, or a tuple of them, along which the state is the
            same everywhere. Only the first device along it calls the host.

    Raises:
        LossScaleError: if more steps in a row were skipped; if ``skip_rate``, the share
            of skipped steps of late, is above 1/4; if the scale is not a positive
            number.
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
    if isinstance(scale_state.loss_scale, jax.ShapeDtypeStruct):
        check_state(scale_state)  # raises
    limit = check("max_consecutive_skips", max_consecutive_skips)
    every = check("every", every)
    if on_error is not None:
        check("on_error", on_error)
    if grads is not None:
        check_gradients(grads)
    if axis_name is not None:
        check_axis_name(axis_name)
    leaves = jax.tree.leaves((state, grads))
    eager = not any(isinstance(x, jax.core.Tracer) for x in leaves)
    tell = functools.partial(_tell, limit, on_error)
    scale_state, grads = jax.lax.stop_gradient((scale_state, grads))

    def report() -> GradientReport | None:
        scale = scale_state.loss_scale
        return None if grads is None else gradient_report(grads, loss_scale=scale)

    due = _is_due(scale_state, limit, every, eager)
    if eager:
        if (fetched := jax.device_get(due)).any():
            tell(fetched, scale_state, report())
        return
    if axis_name is not None:
        due &= jax.lax.axis_index(axis_name) == 0
    jax.lax.cond(
        due.any(),
        lambda: jax.debug.callback(tell, due, scale_state, report()),
        lambda: None,
    )


def _raise(message: str, on_error: Callable[[LossScaleError], None] | None) -> None:
    if on_error is None:
        raise LossScaleError(message)
    on_error(LossScaleError(message))


def _tell(
    limit: int,
    on_error: Callable[[LossScaleError], None] | None,
    due: Any,
    state: LossScaleState,
    report: GradientReport | None,
) -> None:
    """Tell the user, on the host, what is due."""
    stopped, *others = due  # all False for another member under ``jax.vmap``
    for message, is_due in zip(WARNINGS, others, strict=True):
        if is_due:
            warn(message)
    if stopped:
        _raise(stop_message(state, limit, report), on_error)


@functools.partial(jax.jit, static_argnames=("limit", "every", "eager"))
def _is_due(state: LossScaleState, limit: int, every: int, eager: bool) -> jax.Array:
    """Return whether training has stopped, and whether each of the warnings is due.

    The first is reported at the first skip beyond the limit, then every few; the
    warnings, in a compiled loop, once in a while.
    """
    skips, tracker = state.consecutive_skips, state.growth_tracker
    in_a_row = (skips > limit) & ((skips - limit - 1) % every == 0)
    # Only a fault skips more: a rule overflows once in its growth interval.
    often = (state.skip_rate > 0.25) & (state.skipped_steps % every == 0)
    wrong = ~((state.loss_scale > 0) & (state.loss_scale < jnp.inf))
    # So many finite steps in a row have had this scale.
    unused = (state.loss_scale >= 2.0**24) & (state.skipped_steps == 0)
    unused &= (tracker >= 500) & (eager | (tracker % 500 == 0))
    # A rule that changes its scale recovers from a low one, unless batches are bad.
    low = state.loss_scale <= 1
    losing = low & (state.hysteresis_tracker >= 0) & ~often
    losing &= (state.skip_rate > 0.05) & (skips <= 1) & (tracker < 50)
    losing &= eager | (skips == 1) & (state.skipped_steps % every == 0)
    first = low & (skips == state.skipped_steps) & (skips < limit)
    first &= (skips >= 20) & (eager | (skips == 20))
    due = (in_a_row | often | wrong, unused, losing, first)
    return jnp.stack([*map(jnp.any, due)])
