"""The guard that a host, or a compiled loop, may ask whether training has stopped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._find import get_loss_scale_state
from .._finite import AxisName, check_axis_name
from .._jax_internals import is_staging
from .._state import LossScaleState
from .._validation import check_concrete, check_count, describe
from .report import GradientReport, check_gradients, gradient_report
from .stopped import is_due, stop_message
from .table import check_report


class LossScaleError(RuntimeError):
    """Raised by the guards: steps are skipped, and none is applied.

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
    """Do in a compiled loop what `check_loss_scale` does on the host.

    For training that runs many steps in one ``jax.lax.scan``. Whether too many steps
    have been skipped is decided on the device; only then is the host called, by
    ``jax.debug.callback``, and nothing waits for that. A GPU may have to bring the
    decision itself to the host, as that of any ``jax.lax.cond``: where that matters,
    nest two scans and call this in the outer one. ``jax.vmap`` runs both sides of a
    branch, and so calls the host in every step: for an ensemble, call this outside of
    it with the state of all members, without ``grads``. Outside of compiled functions
    this waits for the device and decides on the host, as `check_loss_scale` does.

    Without ``on_error`` the error ends the compiled program. XLA passes no exception
    on: you get a ``jax.errors.JaxRuntimeError`` with the text of the `LossScaleError`
    in it, from the call or when the results are waited for. jax logs the error as well.
    The results are lost then, as are arguments that were donated. To raise the
    `LossScaleError` itself, keep it, and raise it on the host as in the first example.

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
        axis_name: inside ``shard_map``, ``pmap`` or ``vmap``, the name of the mapped
            axis, or a tuple of names, along which the state is the same everywhere.
            Only the first device along them calls the host, and ``grads`` are its own.
            Without it every device calls.

    Returns:
        Nothing.

    Raises:
        LossScaleError: outside of compiled functions, if more steps were skipped.
        ValueError: if ``state`` has no loss scale or more than one,
            ``max_consecutive_skips`` or ``every`` is no count, ``grads`` can be no tree
            of gradients, ``on_error`` cannot be called, or ``axis_name`` is not bound
            here.

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

        Without ``on_error`` jax raises its own error:

        >>> try:
        ...     state = jax.block_until_ready(train(rule.init(), flags, on_error=None))
        ... except jax.errors.JaxRuntimeError as error:
        ...     print("LossScaleError: The last 3 steps were all" in str(error))
        True
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
    if axis_name is not None:
        check_axis_name(axis_name)
    scale_state, grads = jax.tree.map(
        _without_derivative, (get_loss_scale_state(state), grads)
    )

    def tell_host(
        due: Any, scale_state: LossScaleState, report: GradientReport | None
    ) -> None:
        # ``jax.vmap`` calls for every member.
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


def _check_limit(max_consecutive_skips: int) -> int:
    return check_count(
        "max_consecutive_skips",
        max_consecutive_skips,
        "It is how many steps in a row may be skipped.",
    )
