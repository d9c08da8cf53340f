"""Ask whether steps were applied, and protect state outside of the optimizer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._axes import AxisName, all_along
from .._dtypes import is_inexact
from .._find import find_state, get_loss_scale_state, raw_scale_state
from .._finite import all_finite
from .._flax_internals.nnx_objects import is_object, leaves_with_objects
from .._gradients.notes import Note, noted
from .._jax_internals import is_computed, operands
from .._state import LossScaleState, check_state
from .._tree import Tree, as_sharded, select_each, where
from .._validation import advise_on_call, is_traced, warn

_CALL = "keep_if_applied(opt_state, new=new, old=old)"


def was_applied(state: Any) -> jax.Array:
    """Return whether the last step was applied and not skipped, for example to log it.

    Args:
        state: the optimizer state after the step, as for `get_loss_scale_state`.

    Returns:
        A boolean array of shape ``()``, True before the first step.

    Raises:
        ValueError: as `get_loss_scale_state`.

    Examples:
        >>> import optax_lossscale as ls
        >>> bool(ls.was_applied(ls.LossScaleState.create(128.0).record(False)))
        False
    """
    return get_loss_scale_state(state).applied


@advise_on_call(f"Only the state is passed by position: `{_CALL}`.")
def keep_if_applied(
    state: Any, *, new: Tree, old: Tree, axis_name: AxisName | None = None
) -> Tree:
    """Return ``new`` after an applied step, and ``old`` after a skipped step.

    Use it for state that the optimizer does not protect in a skipped step, such as
    BatchNorm statistics, counters and PRNG keys.

    Args:
        state: the optimizer state that ``update`` returned, as for
            `get_loss_scale_state`. The state from before ``update`` is wrong here: it
            records the previous step.
        new: the values after the step, any pytree, as for `select`. It may be the whole
            of Flax's ``TrainState``.
        old: the values before the step, in the structure and shapes of ``new``.
        axis_name: the mapped axes, as for `all_finite`.

    Returns:
        After a skipped step, ``old``. After an applied step, ``new``, except that a
        leaf with a NaN or inf that ``old`` does not have is taken from ``old``. A
        `LossScaleState` is always taken from ``new``, so that a lowered scale is kept.

    Raises:
        TypeError: if ``new`` or ``old`` is not passed by name.
        ValueError: as `get_loss_scale_state`, `select` and `all_finite`, or if
            ``state`` is in ``old``.

    Warns:
        UserWarning: if ``new`` and ``old`` are the same object; if ``old`` is a copy of
            ``new``; if a compiled step has already passed ``state`` to ``update``.

    Examples:
        >>> import optax_lossscale as ls
        >>> skipped = ls.LossScaleState.create(128.0).record(False)
        >>> float(ls.keep_if_applied(skipped, new=1.0, old=0.0))
        0.0
    """
    scale_state = check_state(raw_scale_state(find_state(state, _CALL)))
    _check_order(scale_state.skipped_steps, new, old)
    _warn_of_the_same(new, old)
    # Outside of a trace, the state of an earlier step may be looked at later.
    count = scale_state.skipped_steps
    if is_traced(count) and noted(Note.UPDATED, count):
        warn(
            "`state` is the optimizer state that `update` was given, which records the "
            "previous step. Pass the state that `update` returned."
        )
    given, new, old = new, _without_scales(new), _without_scales(old)
    applied = scale_state.applied
    flags = [applied]
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=False):
        # `select_each` raises for other shapes.
        is_checked = is_inexact(x) and np.shape(x) == np.shape(y)
        flags.append(applied & _is_finite_where_old_is(x, y) if is_checked else applied)
    # One collective for all leaves.
    _, *flags = all_along(jnp.stack(flags), axis_name)
    kept = select_each(iter(flags), new, old, "`new` and `old`")
    return jax.tree.map(
        lambda x, kept: x if _is_scale(x) else kept, given, kept, is_leaf=_is_scale
    )


def _check_order(count: jax.Array, new: Any, old: Any) -> None:
    """Raise if the count of the state is in the old tree, and not in the new one."""
    holds = [any(x is count for x in jax.tree.leaves(tree)) for tree in (new, old)]
    if holds == [False, True]:
        raise ValueError(
            "`new` must be the values after the step, and `old` those before it, got "
            "the loss scale of `state` in `old`. Pass the state that `update` "
            f"returned: `{_CALL}`."
        )


def _warn_of_the_same(new: Any, old: Any) -> None:
    """Warn of variables of Flax NNX, which change in place, and of one whole tree."""
    before, after = leaves_with_objects(old), leaves_with_objects(new)
    same = [k for k, x in after.items() if is_object(x) and x is before.get(k)]
    if same or new is old and any(map(is_inexact, after.values())):
        place = same[0] if same else "the root"
        warn(
            f"`new` and `old` are the same object at {place}, so a NaN in it cannot be "
            "undone. If the step changes this object in place, like Flax NNX, copy it "
            "before the step: `jax.tree.map(jnp.copy, old)`. If the step does not "
            "change it, leave it out."
        )
    # What the step does not change, such as an unused random key, is its own copy.
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=False)
    copied = [(x, z) for x, y in pairs for z in operands(y, "copy")]
    if all(x is z for x, z in copied) and any(is_computed(x) for x, _ in copied):
        warn(
            "`old` is a copy of `new`, made after the step had changed it, so a NaN in "
            "it would stay. Copy it before the loss is computed."
        )


def _is_scale(x: Any) -> bool:
    # `nnx.state(optimizer)` makes a mapping of it.
    is_mapping = isinstance(x, Mapping) and {"loss_scale", "skipped_steps"} <= {*x}
    return is_mapping or isinstance(x, LossScaleState)


def _without_scales(tree: Any) -> Any:
    return jax.tree.map(lambda x: None if _is_scale(x) else x, tree, is_leaf=_is_scale)


# Compiled: a zero outside of a program would be transferred to the device, and a NaN
# would raise with `jax_debug_nans`.
@jax.jit
def _is_finite_where_old_is(new: jax.Array, old: jax.Array) -> jax.Array:
    was_finite = as_sharded(jnp.isfinite(old), new)
    return all_finite(where(was_finite, new, jnp.zeros_like(new)))
