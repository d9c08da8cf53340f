"""MindSpore: the loss-scale managers."""

from .._rules.fixed import FixedLossScale
from .._validation import check, check_bool
from ._build import Growing, factors, growing


def mindspore_fixed(
    loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> FixedLossScale:
    """Return the rule of MindSpore's ``FixedLossScaleManager``.

    The scale is constant. Non-finite steps are skipped unless ``drop_overflow_update``
    is False.

    Departures: `value_and_grad` and `unscale_grads` always divide the gradients; in
    MindSpore the optimizer divides them if ``drop_overflow_update`` is False.

    Args:
        loss_scale: the scale, 1 or more.
        drop_overflow_update: whether to skip non-finite steps. If False, nothing is
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
        "It decides whether non-finite steps are skipped.",
    )
    return FixedLossScale(loss_scale, skip_nonfinite=drop_overflow_update)


def mindspore_dynamic(
    init_loss_scale: float = 2.0**24,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> Growing:
    """Return the rule of MindSpore's ``DynamicLossScaleManager``.

    The scale is multiplied by ``scale_factor`` after every ``scale_window`` finite
    steps in a row. It is divided by ``scale_factor``, down to 1, after every non-finite
    step.

    ``DynamicLossScaleUpdateCell`` and ``amp.DynamicLossScaler`` follow the same rule.
    They call the first scale ``loss_scale_value`` and ``scale_value``.

    Departures: the maximum is 2**126; MindSpore has none. MindSpore raises RuntimeError
    after more than 1,000 overflows in a row; here use `check_loss_scale` with
    ``max_consecutive_skips=1000``. Gradients are divided in float32 or wider; MindSpore
    divides them in their own type, and in float16 its default scale is infinite.

    Args:
        init_loss_scale: the first scale. If it is below 1, it stays until an overflow
            raises it to 1, as in MindSpore.
        scale_factor: the factor by which the scale grows and backs off, above 1.
        scale_window: finite steps in a row before the scale grows.

    Returns:
        A `DynamicLossScale`, or a `VerbatimLossScale` if ``init_loss_scale`` is below
        1.

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
        init_scale=check("init_scale", init_loss_scale, "init_loss_scale"),
        **factors(scale_factor, "scale_factor"),
        growth_interval=check("growth_interval", scale_window, "scale_window"),
        min_scale=1.0,
    )
