"""The Optax transformation that skips steps and updates the loss scale."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from .._axes import AxisName, all_along, check_agreement
from .._find import find_nodes
from .._finite import all_finite
from .._gradients.forgotten import (
    refuse_gradients,
    warn_if_forgotten,
    warn_if_overflow_is_hidden,
)
from .._gradients.notes import Note, note
from .._jax_internals import in_memory_of
from .._rules.base import LossScale, check_rule, matching_state, next_state
from .._rules.dynamic import DynamicLossScale
from .._state import (
    LossScaleState,
    WithLossScalingState,
    check_state,
    with_counts,
)
from .._tree import select
from .._validation import advise_on_call, check_flag, check_loss, check_switch, describe
from .check_updates import results_finite
from .inner import check_inner
from .mask import masked_update
from .master_weights import check_last, warn_of_float16, warn_of_narrow_grads
from .state_types import with_kept_types

if TYPE_CHECKING:

    class _Update(Protocol):
        def __call__(
            self,
            updates: optax.Updates,
            state: optax.OptState,
            params: optax.Params | None = None,
            **extra_args: Any,
        ) -> tuple[optax.Updates, WithLossScalingState]: ...

    class LossScaling(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
        """Optax types every state as a tree: say which state it is."""

        init: Callable[[optax.Params], WithLossScalingState]
        update: _Update
else:
    LossScaling = optax.GradientTransformationExtraArgs


@advise_on_call(
    "What the scale does is decided by the rule: "
    "`with_loss_scaling(optimizer, DynamicLossScale(init_scale=2.0**16))`."
)
def with_loss_scaling(
    inner: optax.GradientTransformation,
    rule: LossScale = DynamicLossScale(),
    *,
    axis_name: AxisName | None = None,
    check_updates: bool = False,
) -> LossScaling:
    """Wrap an optimizer to skip steps with NaN or inf, and to adapt the loss scale.

    The state holds the loss scale, by which `value_and_grad` multiplies the loss. If
    the scale is too large, gradients overflow to inf or NaN. ``update`` then skips the
    step: it returns updates of -0.0, which do not change the parameters, and the old
    state of ``inner``, bit for bit. After every step, ``rule`` computes the next scale.

    Pass the unscaled gradients that `value_and_grad` or `unscale_grads` returns to
    ``update``. Put `with_loss_scaling` outermost: around clipping, weight decay,
    schedules, ``optax.MultiSteps``, ``optax.masked`` and ``optax.partition``, not
    inside them.

    For float16 and float8 parameters, ``init`` makes the same state as for float32
    parameters. float16 parameters lose small updates. To keep these updates, use
    `with_master_weights`.

    Args:
        inner: the optimizer, any Optax transformation. If you donate its state, do so
            in the ``jit`` of the whole step, because a skipped step returns the old
            state.
        rule: how the loss scale changes; to skip steps alone, see `skip_nonfinite`.
        axis_name: inside ``shard_map``, ``pmap`` or ``vmap``, the mapped axis, or a
            tuple of axes, along which gradients or ``value`` differ. A step is applied
            only if they are finite everywhere along it. Not needed under plain ``jit``.
        check_updates: whether to check the results of ``inner`` as well. A step is then
            skipped if it would put a new NaN or inf into the updates, the state or the
            parameters. The scale and its counters of growth and backoff do not change,
            because no scale prevents this. It costs another pass over gradients, state
            and parameters.

    Returns:
        The transformation. Its ``update`` passes on the extra arguments that ``inner``
        takes. Two extra arguments decide whether the step is applied, unless the rule
        never skips:

        - ``grads_finite``: one boolean, combined with the check of the gradients. False
          skips the step, and the rule treats it as an overflow.
        - ``value``: the unscaled loss. If it is not finite, the step is skipped, and
          the scale and its counters of growth and backoff do not change.

    Raises:
        TypeError: if ``inner`` is not an Optax transformation or ``rule`` is not a
            `LossScale`; from ``update``, if ``state`` is not a `WithLossScalingState`.
        ValueError: if ``check_updates`` is not a bool, or is True and the rule never
            skips; from ``init``, if ``inner`` scales losses itself, or changes updates
            after `with_master_weights`; from ``update``, if gradients, the state or an
            extra argument are not as described, ``axis_name`` is not bound, or devices
            of a ``shard_map`` would decide differently.

    Warns:
        UserWarning: if parameters are float16, not frozen, and ``inner`` has no
            `with_master_weights`; from ``update``,

            - if no loss was ever scaled for a state of this structure;
            - if a compiled step divides its gradients by a scale that is a constant;
            - if ``scale_loss`` was called in this step, but not ``unscale_grads``;
            - if ``unscale_grads`` was called, but its result is not used;
            - if a compiled step divides by the scale of another optimizer;
            - if a compiled step divides unscaled gradients by the scale by hand;
            - if a compiled step clips or replaces inf in all gradients, at a dynamic
              scale and without ``grads_finite``;
            - if the state that `value_and_grad_with_retries` returned is not used;
            - if gradients are float16 or float8, but their parameters are not;
            - if the state of ``inner`` is rounded to narrower dtypes in every step;
            - if ``loss`` or a similar name is passed, but not ``value``.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> def loss_fn(params, x):
        ...     return jnp.sum(params * x)
        >>> params, bad_batch = jnp.array([1.0, 2.0]), jnp.array([0.1, jnp.inf])
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3))
        >>> opt_state = tx.init(params)
        >>> loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, bad_batch)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> print(updates, ls.get_loss_scale(opt_state))
        [-0. -0.] 16384.0

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.2
    """
    check_inner(inner, "with_loss_scaling")
    check_rule(rule)
    advice = "Pass True to check the optimizer's results as well."
    check_switch("check_updates", check_updates, advice)
    if check_updates and not rule.skip_nonfinite:
        raise ValueError(
            f"`check_updates` must be False with {rule!r}, which never skips, "
            "got True. Use a rule that skips, such as `FixedLossScale(1.0)`."
        )
    inner = with_kept_types(inner)

    def init_fn(params: optax.Params) -> WithLossScalingState:
        try:
            inner_state = inner.init(params)
        except TypeError as error:
            if not any(map(callable, jax.tree.leaves(params))):
                raise
            raise TypeError(
                "`params` must hold only arrays, got functions among them. Of an "
                "Equinox module, pass `eqx.filter(model, eqx.is_inexact_array)`."
            ) from error
        if find_nodes(inner_state, LossScaleState):
            raise ValueError(
                "`inner` must not scale losses itself, but its state contains a "
                "LossScaleState. The outer check would hide overflows from the inner "
                "rule. Use one wrapper only, outermost."
            )
        check_last(inner_state)
        warn_of_float16(params, inner_state)
        return WithLossScalingState(check_state(rule.init()), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: WithLossScalingState,
        params: optax.Params | None = None,
        *misplaced: Any,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState]:
        scale_state = _checked_scale_state(
            rule, updates, state, params, misplaced, extra_args
        )
        old = state.inner_state
        grads_finite, loss_finite = _inputs_finite(updates, extra_args, axis_name)
        finite = grads_finite & loss_finite
        check_agreement(finite, scale_state.loss_scale, axis_name)
        takes_grads = extra_args.get("grad_fn") is not None
        is_checked = check_updates or takes_grads

        def checked_update(grads: optax.Updates, extra_args: dict[str, Any]) -> Any:
            new_updates, new = inner.update(grads, old, params, **extra_args)
            usable = jnp.ones((), jnp.bool_)
            if is_checked:
                usable = results_finite(new_updates, new, old, params, axis_name)
                check_agreement(usable, scale_state.loss_scale, axis_name)
            return usable, new_updates, new

        applied, new_updates, new = masked_update(
            checked_update, finite, updates, extra_args, old, is_checked=is_checked
        )
        # A lower scale also helps if gradients overflow that the optimizer takes. It
        # does not help if the unscaled loss is not finite, or if the optimizer turns
        # finite gradients into NaN or inf.
        none_overflowed = applied if takes_grads else grads_finite
        recorded = scale_state.record(applied)
        new_scale_state = select(
            loss_finite & (applied | ~none_overflowed),
            next_state(rule, scale_state, none_overflowed, updates, axis_name),
            recorded,
        )
        # A rule of the user's own need not count.
        counted = with_counts(new_scale_state, recorded)
        counted = jax.tree.map(in_memory_of, counted, scale_state)
        note(Note.RETURNED, counted.loss_scale)
        note(Note.UPDATED, state.scale_state.skipped_steps)
        return new_updates, WithLossScalingState(counted, new)

    def always_apply_fn(
        updates: optax.Updates,
        state: WithLossScalingState,
        params: optax.Params | None = None,
        *misplaced: Any,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScalingState]:
        scale_state = _checked_scale_state(
            rule, updates, state, params, misplaced, extra_args
        )
        new_updates, new = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        new_scale_state = next_state(rule, scale_state, True, updates, axis_name)
        counted = with_counts(new_scale_state, scale_state.record(True))
        return new_updates, WithLossScalingState(counted, new)

    update = update_fn if rule.skip_nonfinite else always_apply_fn
    return cast(LossScaling, optax.GradientTransformationExtraArgs(init_fn, update))


def _checked_scale_state(
    rule: LossScale,
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None,
    misplaced: tuple[Any, ...],
    extra_args: dict[str, Any],
) -> LossScaleState:
    """Check the arguments of ``update``, and return the scale's state in its dtypes."""
    if misplaced:
        raise TypeError(
            "`update` must get all arguments after gradients, state and parameters by "
            f"name, got {describe(misplaced[0])} by position. Call "
            "`tx.update(grads, state, params, value=loss)`."
        )
    if not isinstance(state, WithLossScalingState):
        raise TypeError(
            "`state` must be a WithLossScalingState, as `init` returns it, got "
            f"{describe(state)}. Call `tx.update(grads, state, params)`. "
            "If you restored it from a checkpoint, pass "
            "`init(params)` to the checkpointer as the target. If it belongs to the "
            "unwrapped optimizer, use `init(params)._replace(inner_state=...)`."
        )
    if (flag := extra_args.get("grads_finite")) is not None:
        check_flag("grads_finite", flag)
    check_loss(extra_args.get("value"))
    if getattr(rule, "loss_scale", None) != 1:  # unless it is fixed there
        refuse_gradients(params, updates)
        warn_if_forgotten(state, updates, flag is not None)
        # A step at a fixed scale may also be skipped by a `value` of NaN.
        if flag is None and rule.skip_nonfinite and not hasattr(rule, "loss_scale"):
            warn_if_overflow_is_hidden(updates)
        warn_of_narrow_grads(updates, params)
    warn_of_float16(params, state.inner_state)
    return matching_state(rule, state.scale_state)


def _inputs_finite(
    grads: optax.Updates, extra_args: dict[str, Any], axis_name: AxisName | None
) -> tuple[jax.Array, jax.Array]:
    """Return whether the gradients and the loss are finite, on all devices."""
    grads_finite = all_finite(grads)
    if (flag := extra_args.get("grads_finite")) is not None:
        grads_finite &= flag
    loss_finite = jnp.ones((), jnp.bool_)
    if (value := extra_args.get("value")) is not None:
        loss_finite = all_finite(value, axis_name=axis_name)
    return all_along(grads_finite, axis_name), loss_finite
