"""MindSpore: its loss-scale managers."""

from .._rules.arguments import (
    check_growth_interval,
    check_init_scale,
)
from .._rules.fixed import FixedLossScale
from .._validation import check_bool
from ._build import Growing, factors, growing


def mindspore_fixed(
    loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> FixedLossScale:
    """Return the rule of MindSpore's ``FixedLossScaleManager``.

    The scale stays; steps with non-finite gradients are dropped unless told not to.

    Departures: gradients are always divided by `value_and_grad` or `unscale_grads`,
    where MindSpore leaves it to the optimizer if nothing is dropped.

    Args:
        loss_scale: the scale, 1 or more.
        drop_overflow_update: whether non-finite steps are skipped. If not, nothing is
            checked.

    Returns:
        A `FixedLossScale`.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mindspore_fixed(drop_overflow_update=False)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)

    References:
        `mindspore.amp.FixedLossScaleManager
        <https://www.mindspore.cn/docs/en/master/api_python/amp/mindspore.amp.FixedLossScaleManager.html>`_
    """
    check_bool(
        "drop_overflow_update",
        drop_overflow_update,
        "It says whether non-finite steps are skipped.",
    )
    return FixedLossScale(loss_scale, skip_nonfinite=drop_overflow_update)


def mindspore_dynamic(
    init_loss_scale: float = 2.0**24,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> Growing:
    """Return the rule of MindSpore's ``DynamicLossScaleManager``.

    The scale is multiplied by ``scale_factor`` at every ``scale_window``-th finite step
    in a row, and divided by it, down to 1, at every non-finite step.
    ``DynamicLossScaleUpdateCell`` and ``amp.DynamicLossScaler`` follow the same rule;
    they call the first scale ``loss_scale_value`` and ``scale_value``.

    Departures: the ceiling is 2**126, where MindSpore has none. MindSpore raises
    RuntimeError after more than 1,000 overflows in a row; here `check_loss_scale` does,
    with ``max_consecutive_skips=1000``. MindSpore divides gradients in their own type,
    where in float16 the default scale is infinite; here it is float32 or wider.

    Args:
        init_loss_scale: the first scale. One below 1 stays until an overflow raises it
            to 1, as in MindSpore.
        scale_factor: what a growth multiplies by and a backoff divides by, above 1.
        scale_window: finite steps in a row before a growth.

    Returns:
        A `DynamicLossScale`; a `VerbatimLossScale` for a first scale below 1.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.mindspore_dynamic().init_scale == 2.0**24
        True

    References:
        `mindspore.amp.DynamicLossScaleManager
        <https://www.mindspore.cn/docs/en/master/api_python/amp/mindspore.amp.DynamicLossScaleManager.html>`_
    """
    return growing(
        init_scale=check_init_scale(init_loss_scale, "init_loss_scale"),
        **factors(scale_factor, "scale_factor"),
        growth_interval=check_growth_interval(scale_window, "scale_window"),
        min_scale=1.0,
    )
