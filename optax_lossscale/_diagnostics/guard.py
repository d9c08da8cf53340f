"""The guard that a host, or a compiled loop, may ask whether training has stopped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._find import get_loss_scale_state
from .._state import LossScaleState
from .._validation import check_concrete, check_count, describe
from .report import GradientReport, check_gradients, gradient_report
from .table import check_report, format_report


class LossScaleError(RuntimeError):
    """Raised by `check_loss_scale`: steps are skipped and none is applied.

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
    """Raise if too many steps in a row have been skipped.

    It waits for the device, so call it now and then from the host, where you log. A
    compiled step neither waits nor raises; for a compiled loop of many steps there is
    `watch_loss_scale`.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        max_consecutive_skips: how many steps in a row may be skipped, 1 or more. A
            scale that starts at 2**15 has come to 1 after 15 of them.
        report: the `gradient_report` of the last gradients, to be shown in the error.

    Returns:
        Nothing.

    Raises:
        LossScaleError: if more steps were skipped since the last one that was applied.
        ValueError: if ``state`` has no loss scale or more than one, or is being traced;
            if ``max_consecutive_skips`` is no count, or ``report`` no report.

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
        MindSpore's ``DynamicLossScaleManager`` gives up after more than 1,000
        overflows in a row; DeepSpeed at the first one at the least scale.
    """
    limit = _check_limit(max_consecutive_skips)
    scale_state = get_loss_scale_state(state)
    check_concrete(
        "state",
        scale_state,
        "Call `check_loss_scale` outside of the compiled function, or "
        "`watch_loss_scale` inside.",
    )
    if report is not None:
        check_report(report)
    host_state = jax.device_get(scale_state)
    # Of an ensemble, the member that stands still for longest.
    worst = np.unravel_index(
        np.argmax(host_state.consecutive_skips), np.shape(host_state.consecutive_skips)
    )
    skips, skipped, scale = (
        np.asarray(x)[worst]
        for x in (
            host_state.consecutive_skips,
            host_state.skipped_steps,
            host_state.loss_scale,
        )
    )
    if skips > limit:
        table = ""
        if report is not None:
            table = f"\nThe last gradients:\n{format_report(report, limit=5)}"
        member = f" of member {', '.join(map(str, worst))}" if worst else ""
        raise LossScaleError(
            f"The last {skips} steps{member} were all skipped, more than "
            f"`max_consecutive_skips`={limit}, and {skipped} in all; the loss scale is "
            f"{scale:g}. If it has come to its floor, no scale cures the gradients: "
            "look for a NaN in the data, the loss or the parameters, or lower the "
            "learning rate. If it is still falling, start from a lower one."
            f"{table}"
        )


def watch_loss_scale(
    state: Any,
    *,
    max_consecutive_skips: int = 100,
    every: int = 1,
    grads: Any = None,
    on_error: Callable[[LossScaleError], None] | None = None,
) -> None:
    """Do in a compiled loop what `check_loss_scale` does on the host.

    For training that runs many steps in one ``jax.lax.scan``. Whether too many steps
    have been skipped is decided on the device; only then is the host called, by
    ``jax.debug.callback``, and nothing waits for that. A GPU may have to bring the
    decision itself to the host, as that of any ``jax.lax.cond``: where that matters,
    nest two scans and call this in the outer one. ``jax.vmap`` runs both sides of a
    branch, and so the host in every step: of an ensemble give the state of all members,
    outside of it, without ``grads``.

    Without ``on_error`` the error ends the program: jax raises a
    ``jax.errors.JaxRuntimeError`` with the text of the `LossScaleError` in it when the
    results are waited for. They are lost then, as are arguments that were donated.

    Args:
        state: the optimizer state after the update, or whatever
            `get_loss_scale_state` takes.
        max_consecutive_skips: how many steps in a row may be skipped, 1 or more.
        every: the number of skipped steps between two reports: the host is called at
            the first skipped step beyond the limit, and once every so many after it.
            Use 1 if you call this only now and then.
        grads: the gradients of this step, to show their `gradient_report` in the error.
            It is computed only when there is one, but compiled with the loop.
        on_error: called on the host with the `LossScaleError`, in place of raising it:
            to log it, to save something, to set a flag.

    Returns:
        Nothing.

    Raises:
        ValueError: if ``state`` has no loss scale or more than one,
            ``max_consecutive_skips`` or ``every`` is no count, ``grads`` can be no tree
            of gradients, or ``on_error`` cannot be called.

    Examples:
        >>> import jax
        >>> import optax_lossscale as ls
        >>> rule, errors = ls.DynamicLossScale(), []
        >>> def step(state, flag):
        ...     state = rule.update(state, flag)
        ...     ls.watch_loss_scale(
        ...         state, max_consecutive_skips=2, on_error=errors.append
        ...     )
        ...     return state, None
        >>> flags = jax.numpy.array([False, False, False, True])
        >>> state, _ = jax.jit(lambda s: jax.lax.scan(step, s, flags))(rule.init())
        >>> jax.effects_barrier()
        >>> print(errors[0])
        The last 3 steps were all skipped, ...
    """
    limit = _check_limit(max_consecutive_skips)
    every = check_count(
        "every", every, "It is the number of skipped steps between two reports."
    )
    if on_error is not None and not callable(on_error):
        raise ValueError(
            f"`on_error` must be a function of one LossScaleError, got "
            f"{describe(on_error)}. Leave it out to have the error raised."
        )
    if grads is not None:
        check_gradients("grads", grads)
    scale_state = get_loss_scale_state(state)

    def on_host(scale_state: LossScaleState, report: GradientReport | None) -> None:
        try:
            check_loss_scale(scale_state, max_consecutive_skips=limit, report=report)
        except LossScaleError as error:
            if on_error is None:
                raise
            on_error(error)

    def call_host() -> None:
        report = None
        if grads is not None:
            report = gradient_report(grads, loss_scale=scale_state.loss_scale)
        jax.debug.callback(on_host, scale_state, report)

    beyond = scale_state.consecutive_skips - limit
    due = (beyond > 0) & ((beyond - 1) % every == 0)
    jax.lax.cond(jnp.any(due), call_host, lambda: None)


def _check_limit(max_consecutive_skips: int) -> int:
    return check_count(
        "max_consecutive_skips",
        max_consecutive_skips,
        "It is how many steps in a row may be skipped.",
    )
