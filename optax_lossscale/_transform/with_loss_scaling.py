"""The Optax transformation that skips steps and keeps the loss scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._find import find_loss_scale_states
from .._finite import AxisName, all_finite, everywhere, max_magnitude
from .._rules.base import LossScale
from .._rules.dynamic import DynamicLossScale
from .._state import LossScaleState, check_single, recorded
from .._tree import select
from .._validation import check_bool, check_flag, check_value
from .extra_args import check_inner, with_extra_args
from .inner import update
from .masks import masked_update
from .master_weights import warn_of_float16
from .outcome import outcome_finite
from .rule import check_agreement, check_rule, init_scale, update_scale
from .types import settled_state


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
    check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients are not finite, and let them move the loss scale.

    A skipped step leaves the state of ``inner`` bit for bit as it was and returns
    updates of -0.0, which change no bit of a parameter. So no NaN or infinity that is
    among the gradients gets into either. One that the optimizer itself makes of finite
    gradients does, unless ``check_updates``. The gradients passed to ``update`` are
    true gradients, as `value_and_grad` and `unscale_grads` return them: nothing is
    divided here.

    Put it outermost: around clipping, weight decay, schedules, ``optax.MultiSteps``,
    ``optax.masked`` and ``optax.partition``, not inside them. Before it, ``optax.clip``
    makes an ordinary number of an infinity and ``optax.zero_nans`` of a NaN: the step
    is then applied. What a mask outside of it leaves out is not checked.

    ``init`` makes the state of ``inner`` as for float32 parameters where these are
    narrower, since true gradients are float32: the moments of float16 parameters take
    as much memory as those of float32 ones. Types asked for by name, such as
    ``mu_dtype`` of ``optax.adam``, are kept. Where gradients are as narrow as their
    parameters, updates are too, and the moments may be: keep what ``inner.init``
    returns by ``tx.init(params)._replace(inner_state=inner.init(params))``. float16
    parameters themselves lose small updates: see `with_master_weights`.

    Args:
        inner: the optimizer, any Optax transformation.
        loss_scale: the rule; ``FixedLossScale(1.0)`` only skips.
        axis_name: inside ``shard_map``, ``pmap`` or ``vmap``, the name of the mapped
            axis, or a tuple of names, over which gradients differ: a step is applied
            only if they are finite everywhere. Not needed under ``jit`` alone.
        check_updates: whether to check what ``inner`` makes of finite gradients, too.
            A step is skipped if a new NaN or infinity would get into the updates, the
            state, or the parameters as ``optax.apply_updates`` returns them, if
            ``update`` is given ``params``. The scale is left alone, with the trackers
            of its next growth and backoff: no scale cures this. It costs another pass
            over gradients, state and parameters.

    Returns:
        The transformation. Extra arguments of its ``update`` that ``inner`` takes are
        passed on; in a step that is skipped, other numbers may stand in for ``value``
        and for what is not finite. Two of them, both optional, also decide whether the
        step is applied, unless the rule never skips:

        - ``grads_finite``, one boolean: a flag from elsewhere, joined with the check
          of the gradients made here. Where it is False the step is skipped and the
          rule told so, as for gradients that are not finite. Several optimizers that
          should skip together are given the same flag. It reaches ``inner`` only if
          the ``update`` of ``inner`` has a parameter of this name.
        - ``value``, the unscaled loss: where it is not finite no scale can cure it, so
          the step is skipped and the scale left alone, with the trackers of its next
          growth and backoff.

    Raises:
        TypeError: if ``inner`` or ``loss_scale`` is of another kind.
        ValueError: if ``check_updates`` is no bool, or the rule skips nothing; from
            ``init``, if ``inner`` scales losses itself; from ``update``,
            if ``inner`` changes the structure or the shapes of its state or makes
            numbers of another kind of them (floats of integers, say), gradients or
            parameters are of another model than the state, ``value`` or
            ``grads_finite`` is not one number or flag, ``axis_name`` is not bound, or
            devices of a ``shard_map`` would decide differently.

    Warns:
        UserWarning: from ``init``, if parameters are float16 and ``inner`` keeps no
            master weights; from ``update``, if the state was not made by ``init`` and
            keeps in half precision what updates give in float32.

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
        [-0. -0.] 16384.0

        A loss that is not finite is no fault of the scale:

        >>> updates, opt_state = tx.update(bad_grads, opt_state, params, value=jnp.inf)
        >>> print(updates, ls.get_loss_scale(opt_state))
        [-0. -0.] 16384.0

        A second moment that overflows is no fault of the scale either:

        >>> tx = ls.with_loss_scaling(optax.adam(1e-3), check_updates=True)
        >>> large = jnp.array([1e30, 1.0])
        >>> updates, opt_state = tx.update(large, tx.init(params), params)
        >>> print(updates, ls.get_loss_scale(opt_state), ls.was_applied(opt_state))
        [-0. -0.] 32768.0 False

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """
    check_inner(inner, "with_loss_scaling")
    check_rule(loss_scale)
    check_bool("check_updates", check_updates, "True also checks what `inner` makes.")
    if check_updates and not loss_scale.skip_nonfinite:
        raise ValueError(
            f"`check_updates` must be False with {loss_scale!r}, which skips nothing, "
            "got True. Use a rule that skips, such as `FixedLossScale(1.0)`."
        )
    inner = with_extra_args(inner)

    def init_fn(params: optax.Params) -> WithLossScalingState:
        inner_state = settled_state(inner, params)
        if find_loss_scale_states(inner_state):
            raise ValueError(
                "`inner` must not scale losses itself, but its state has a "
                "LossScaleState in it. The outer check would hide overflows from the "
                "inner rule: wrap once, outermost."
            )
        warn_of_float16(params, inner_state)
        return WithLossScalingState(init_scale(loss_scale), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: WithLossScalingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState]:
        _check_state(state)
        scale_state = check_single(state.scale_state)

        def inner_update(
            updates: optax.Updates, extra_args: dict[str, Any]
        ) -> tuple[optax.Updates, optax.OptState]:
            return update(inner, updates, state.inner_state, params, extra_args)

        def checked_update(
            updates: optax.Updates, extra_args: dict[str, Any]
        ) -> tuple[jax.Array | None, optax.Updates, optax.OptState]:
            new_updates, new_state = inner_update(updates, extra_args)
            if not check_updates:
                return None, new_updates, new_state
            usable = outcome_finite(new_updates, new_state, state.inner_state, params)
            usable = everywhere(usable, axis_name)
            check_agreement(usable, scale_state, axis_name)
            return usable, new_updates, new_state

        def advance(grads_finite: jax.Array) -> LossScaleState:
            if not loss_scale.uses_max_magnitude:
                return update_scale(loss_scale, scale_state, grads_finite)
            # Its derivative, NaN in a skipped step, is of no use to anyone.
            magnitude = max_magnitude(jax.lax.stop_gradient(updates), axis_name)
            return update_scale(loss_scale, scale_state, grads_finite, magnitude)

        if not loss_scale.skip_nonfinite:
            new_updates, inner_state = inner_update(updates, extra_args)
            new_scale_state = advance(jnp.ones((), jnp.bool_))
            return new_updates, WithLossScalingState(new_scale_state, inner_state)

        grads_finite = all_finite(updates)
        flag = extra_args.get("grads_finite")
        if flag is not None:
            check_flag("grads_finite", flag)
            grads_finite &= flag
        apply = grads_finite = everywhere(grads_finite, axis_name)
        value = extra_args.get("value")
        if value is not None:
            check_value(value)
            value_finite = all_finite(value, axis_name)
            apply = grads_finite & value_finite
        check_agreement(apply, scale_state, axis_name)
        applied, new_updates, inner_state = masked_update(
            checked_update, apply, updates, state.inner_state, extra_args
        )
        new_scale_state = advance(grads_finite)
        if value is not None:
            # No scale cures a loss that is not finite before it is scaled.
            skipped = recorded(scale_state, False)
            new_scale_state = select(value_finite, new_scale_state, skipped)
        if check_updates:
            # No scale cures an optimizer that makes a NaN of finite gradients either.
            skipped = recorded(scale_state, False)
            innocent = applied | ~grads_finite
            new_scale_state = select(innocent, new_scale_state, skipped)
        return new_updates, WithLossScalingState(new_scale_state, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_state(state: Any) -> None:
    if not isinstance(state, WithLossScalingState):
        raise TypeError(
            "`state` must be a WithLossScalingState, as `init` returns, got a "
            f"{type(state).__name__}. If it was restored from a checkpoint, give "
            "the checkpointer `init(params)` as the target; if it belongs to the "
            "unwrapped optimizer, use `init(params)._replace(inner_state=...)`."
        )
