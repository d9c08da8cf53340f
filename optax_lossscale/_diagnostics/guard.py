"""Guards that detect, on the host or in a compiled loop, that training has stopped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._find import get_loss_scale_state
from .._jax_internals import is_staging
from .._state import LossScaleState
from .._validation import (
    AxisName,
    check,
    check_axis_name,
    check_concrete,
    check_count,
    describe,
)
from .report import GradientReport, check_gradients, gradient_report
from .stopped import is_due, stop_message
from .table import check_report


class LossScaleError(RuntimeError):
    """Raised if too many steps in a row were skipped, so training has stopped.

    `check_loss_scale` and `watch_loss_scale` raise it. The message lists possible
    causes and what to do about each.

    Examples:
        >>> import optax_lossscale as ls
        >>> issubclass(ls.LossScaleError, RuntimeError)
        True
    """


def check_loss_scale(
    state: Any,
    *,
    max_consecutive_skips: int = 100,
    report: GradientReport | None = None,
) -> None:
    """Raise an error if too many steps in a row have been skipped.

    If every step is skipped, training has stopped, but the loop runs on. Call this from
    the host now and then, for example where you log. It waits for the device.

    It cannot be called in a compiled function. If you compile a loop of many steps, use
    `watch_loss_scale`.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        max_consecutive_skips: how many steps in a row may be skipped, 1 or more. A
            scale of 2**15 that is halved in each skipped step reaches 1 after 15.
        report: the `gradient_report` of the last gradients, to show in the error.

    Returns:
        Nothing.

    Raises:
        LossScaleError: if more steps in a row were skipped.
        ValueError: if ``state`` has no loss scale or more than one, or is traced; if
            ``max_consecutive_skips`` is not a whole number from 1; or if ``report`` is
            not a `GradientReport`.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.DynamicLossScale(init_scale=4.0)
        >>> state = rule.init()
        >>> for _ in range(3):
        ...     state = rule.update(state, False)
        >>> ls.check_loss_scale(state)
        >>> ls.check_loss_scale(state, max_consecutive_skips=2)
        Traceback (most recent call last):
        ...
        optax_lossscale.LossScaleError: The last 3 steps were all skipped, ...

    References:
        MindSpore's ``DynamicLossScaleManager`` raises an error after more than 1,000
        overflows in a row, and DeepSpeed at the first overflow at its minimum scale.
    """
    limit = check("max_consecutive_skips", max_consecutive_skips)
    scale_state = get_loss_scale_state(state)
    check_concrete(
        "state",
        scale_state,
        "Call `check_loss_scale` outside the compiled function, or "
        "`watch_loss_scale` inside.",
    )
    if report is not None:
        check_report(report)
    if np.any(is_due(jax.device_get(scale_state.consecutive_skips), limit)):
        raise LossScaleError(stop_message(scale_state, limit, report))


def watch_loss_scale(
    state: Any,
    *,
    max_consecutive_skips: int = 100,
    every: int = 1,
    grads: Any = None,
    on_error: Callable[[LossScaleError], None] | None = None,
    axis_name: AxisName | None = None,
) -> None:
    """Raise an error from a compiled loop if too many steps in a row are skipped.

    Use it if many steps run in one ``jax.lax.scan``, where `check_loss_scale` cannot be
    called. The device decides whether too many steps were skipped. Only then does it
    call the host, with ``jax.debug.callback``, and it does not wait for the host.

    Without ``on_error``, the error ends the compiled program. XLA does not pass
    exceptions on, so you get a ``jax.errors.JaxRuntimeError`` that contains the text of
    the `LossScaleError`, from the call or when you wait for the results. JAX logs the
    error too. The results are lost, and so are donated arguments. To raise the
    `LossScaleError` itself, store it in ``on_error`` and raise it on the host, as in
    the first example.

    On a GPU, the decision may be copied to the host in every step, as for any
    ``jax.lax.cond``. If that is too slow, nest two scans and call this in the outer
    one.

    Under ``jax.vmap`` both branches run, so the host is called in every step. For an
    ensemble, call this outside ``jax.vmap``, with the state of all members and without
    ``grads``.

    Outside compiled functions it waits for the device and decides on the host, as
    `check_loss_scale` does.

    Args:
        state: the optimizer state after the update, or whatever
            `get_loss_scale_state` takes.
        max_consecutive_skips: how many steps in a row may be skipped, 1 or more.
        every: the number of skipped steps between two reports. The host is called at
            the first skipped step beyond the limit, and again after each ``every``
            further ones. If you do not call this in every step, use 1.
        grads: the gradients of this step, to show their `gradient_report` in the error.
            The report is compiled with the loop, but computed only for an error.
        on_error: called on the host with the `LossScaleError` instead of raising it,
            for example to log it, to save a checkpoint or to set a flag.
        axis_name: inside ``shard_map``, ``pmap`` or ``vmap``, the name of the mapped
            axis, or a tuple of names, along which the state is the same everywhere.
            Only the first device along them calls the host, with its own ``grads``.
            Without it, every device does.

    Returns:
        Nothing.

    Raises:
        LossScaleError: outside compiled functions, if more steps were skipped.
        ValueError: if ``state`` has no loss scale or more than one; if
            ``max_consecutive_skips`` or ``every`` is not a whole number from 1; if
            ``grads`` is not a tree of gradients; if ``on_error`` is not callable; or if
            ``axis_name`` is not bound here.

    Examples:
        >>> import jax
        >>> import optax_lossscale as ls
        >>> rule, errors = ls.DynamicLossScale(), []
        >>> def train(state, flags, on_error):
        ...     def step(state, flag):
        ...         state = rule.update(state, flag)
        ...         ls.watch_loss_scale(
        ...             state, max_consecutive_skips=2, on_error=on_error
        ...         )
        ...         return state, None
        ...     return jax.lax.scan(step, state, flags)[0]
        >>> train = jax.jit(train, static_argnames="on_error")
        >>> flags = jax.numpy.array([False, False, False, True])
        >>> state = train(rule.init(), flags, on_error=errors.append)
        >>> jax.effects_barrier()
        >>> if errors:
        ...     raise errors[0]
        Traceback (most recent call last):
        ...
        optax_lossscale.LossScaleError: The last 3 steps were all skipped, ...

        Without ``on_error``, JAX raises its own error:

        >>> try:
        ...     state = jax.block_until_ready(train(rule.init(), flags, on_error=None))
        ... except jax.errors.JaxRuntimeError as error:
        ...     print("LossScaleError: The last 3 steps were all" in str(error))
        True
    """
    limit = check("max_consecutive_skips", max_consecutive_skips)
    every = check_count(
        "every", every, "It is the number of skipped steps between two reports."
    )
    if on_error is not None and not callable(on_error):
        raise ValueError(
            "`on_error` must be a function of one LossScaleError, got "
            f"{describe(on_error)}. To raise the error, leave it out."
        )
    if grads is not None:
        check_gradients("grads", grads)
    if axis_name is not None:
        check_axis_name(axis_name)
    scale_state, grads = jax.tree.map(
        _without_derivative, (get_loss_scale_state(state), grads)
    )

    def tell_host(
        due: Any, scale_state: LossScaleState, report: GradientReport | None
    ) -> None:
        # Under ``jax.vmap`` this is called for every member.
        if not due:
            return
        error = LossScaleError(stop_message(scale_state, limit, report))
        if on_error is None:
            raise error
        on_error(error)

    def report() -> GradientReport | None:
        if grads is None:
            return None
        return gradient_report(grads, loss_scale=scale_state.loss_scale)

    skips = scale_state.consecutive_skips
    if not _is_traced((scale_state, grads)) and not is_staging():
        if np.any(is_due(jax.device_get(skips), limit, every)):
            tell_host(True, scale_state, report())
        return
    due = jnp.any(is_due(skips, limit, every))
    if axis_name is not None:
        due &= jax.lax.axis_index(axis_name) == 0
    jax.lax.cond(
        due,
        lambda: jax.debug.callback(tell_host, due, scale_state, report()),
        lambda: None,
    )


def _without_derivative(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
