"""The Optax transformation that skips steps and keeps the loss scale."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._commit import as_before, commit, update
from ._dynamic import DynamicLossScale
from ._inspect import find_loss_scale_states
from ._loss_scale import LossScale
from ._state import LossScaleState
from ._tree import AxisName, all_finite
from ._validation import describe


class WithLossScalingState(NamedTuple):
    """State of `with_loss_scaling`.

    Attributes:
        scale_state: the loss scale and its counters.
        inner_state: the state of the wrapped transformation.

    Examples:
        Wrap the optimizer of a job that has been running without:

        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> params = {"w": jnp.zeros(3)}
        >>> old_state = optax.adam(1e-3).init(params)
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3))
        >>> opt_state = tx.init(params)._replace(inner_state=old_state)
    """

    scale_state: LossScaleState
    inner_state: optax.OptState


def with_loss_scaling(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = DynamicLossScale(),
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients are not finite, and let them move the loss scale.

    A skipped step leaves the state of ``inner`` bit for bit as it was and returns
    updates of exactly zero. The gradients passed to ``update`` are true gradients, as
    `value_and_grad` and `unscale_grads` return them: nothing is divided here.

    Put it outermost: around clipping, weight decay, schedules and
    ``optax.MultiSteps``, not inside them.

    Args:
        inner: the optimizer, any Optax transformation.
        loss_scale: the rule; ``FixedLossScale(1.0)`` only skips.
        axis_name: inside ``shard_map``, ``pmap`` or ``vmap``, the name of the mapped
            axis, or a tuple of names, over which gradients differ: a step is applied
            only if they are finite everywhere. Not needed under ``jit`` alone.

    Returns:
        The transformation. Extra arguments of its ``update`` reach ``inner``
        unchanged.

    Raises:
        TypeError: if ``inner`` or ``loss_scale`` is of another kind.
        ValueError: from ``init``, if ``inner`` scales losses itself; from ``update``,
            if ``inner`` changes the structure of its state.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> params = jnp.array([1.0, 2.0])
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3))
        >>> opt_state = tx.init(params)
        >>> bad_grads = jnp.array([0.1, jnp.inf])
        >>> updates, opt_state = tx.update(bad_grads, opt_state, params)
        >>> print(updates, ls.get_loss_scale(opt_state))
        [0. 0.] 16384.0

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """
    _check_inner(inner)
    _check_rule(loss_scale)
    inner = _with_extra_args(inner)

    def init_fn(params: optax.Params) -> WithLossScalingState:
        inner_state = inner.init(params)
        if find_loss_scale_states(inner_state):
            raise ValueError(
                "`inner` must not scale losses itself, but its state has a "
                "LossScaleState in it. The outer check would hide overflows from the "
                "inner rule: wrap once, outermost."
            )
        return WithLossScalingState(
            loss_scale.init(), jax.tree.map(_strong, inner_state)
        )

    def update_fn(
        updates: optax.Updates,
        state: WithLossScalingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState]:
        if not isinstance(state, WithLossScalingState):
            raise TypeError(
                "`state` must be a WithLossScalingState, as `init` returns, got a "
                f"{type(state).__name__}. If it was restored from a checkpoint, give "
                "the checkpointer `init(params)` as the target; if it belongs to the "
                "unwrapped optimizer, use `init(params)._replace(inner_state=...)`."
            )
        if loss_scale.skip_nonfinite:
            grads_finite = all_finite(updates, axis_name)
            new_updates, inner_state = commit(
                inner, grads_finite, updates, state.inner_state, params, extra_args
            )
        else:
            grads_finite = jnp.ones((), jnp.bool_)
            new_updates, inner_state = update(
                inner, updates, state.inner_state, params, extra_args
            )
        scale_state = loss_scale.update(state.scale_state, grads_finite)
        # A user's rule may well return a Python number for a counter.
        scale_state = jax.tree.map(as_before, scale_state, state.scale_state)
        return new_updates, WithLossScalingState(scale_state, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _strong(x: Any) -> Any:
    """Make a weakly typed leaf strong: the first update would, and trace twice."""
    if isinstance(x, bool | int | float | complex) or getattr(x, "weak_type", False):
        return jnp.asarray(x, jnp.result_type(x))
    return x


def _with_extra_args(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    # optax.MultiSteps takes extra arguments and does not say so by its type.
    parameters = inspect.signature(inner.update).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    return optax.with_extra_args_support(inner)


def _check_inner(inner: Any) -> None:
    rule = "`inner` must be an Optax gradient transformation, got "
    if isinstance(inner, LossScale):
        raise TypeError(
            f"{rule}the rule {inner!r}. The optimizer comes first: "
            "`with_loss_scaling(optimizer, rule)`."
        )
    has_both = callable(getattr(inner, "init", None)) and callable(
        getattr(inner, "update", None)
    )
    if isinstance(inner, type) or not has_both:
        advice = (
            "Call it first, as in `optax.adam(1e-3)`."
            if callable(inner)
            else "Pass an optimizer, as in `with_loss_scaling(optax.adam(1e-3))`."
        )
        raise TypeError(f"{rule}{describe(inner)}. {advice}")


def _check_rule(loss_scale: Any) -> None:
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            "`loss_scale` must be a rule, that is a LossScale, got "
            f"{describe(loss_scale)}. Pass an instance, such as "
            "`FixedLossScale(128.0)` or `DynamicLossScale(init_scale=128.0)`."
        )
