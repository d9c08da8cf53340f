"""PyTorch and Apex."""

from typing import Literal

from .._loss_scale import FixedLossScale, LossScale
from .._validation import check_bool
from ._build import ceiling, first, growing, named


def torch_grad_scaler(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """Return the rule of ``torch.amp.GradScaler``.

    The scale is multiplied by ``growth_factor`` at every ``growth_interval``-th finite
    step in a row, and by ``backoff_factor`` at every other step.

    Departures: the scale stays between 2**-126 and 2**126, where PyTorch's falls to 0,
    from where it makes NaN of the next infinite gradient and applies it. An interval
    that was made shorter than the count of finite steps grows at once, where PyTorch
    waits for the next overflow. ``device`` is of no concern here.

    Args:
        init_scale: the first scale, from 2**-126 to 2**126.
        growth_factor: what a growth multiplies it by, more than 1.
        backoff_factor: what an overflow multiplies it by, between 0 and 1.
        growth_interval: finite steps in a row before a growth.
        enabled: if False, nothing is scaled, checked or skipped, as in PyTorch.

    Returns:
        A `DynamicLossScale`, or a `FixedLossScale` if not ``enabled``.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> rule = presets.torch_grad_scaler(growth_interval=100)
        >>> rule.init_scale, rule.growth_interval, rule.max_scale == 2.0**126
        (65536.0, 100, True)

    References:
        `torch.amp.GradScaler <https://docs.pytorch.org/docs/stable/amp.html>`_
    """
    check_bool("enabled", enabled, "It says whether to scale, check and skip at all.")
    rule = growing(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    return rule if enabled else FixedLossScale(1.0, skip_nonfinite=False)


def apex_amp(
    loss_scale: float | Literal["dynamic"] = "dynamic",
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> LossScale:
    """Return the rule of ``apex.amp``.

    The scale doubles at every ``scale_window``-th finite step in a row, up to
    ``max_loss_scale``, and is halved at every other step, down to ``min_loss_scale``.
    An ``init_scale`` above ``max_loss_scale`` is lowered to it. A number for
    ``loss_scale`` stays, and no step is skipped.

    Departures: without a ``min_loss_scale`` the floor is 2**-126, where Apex goes on to
    0 and divides by it. ``scale_factor``, which Apex takes and does not use, is not
    taken. Apex with ``num_losses`` is a rule and a state for each loss: see the README.

    Args:
        loss_scale: ``"dynamic"``, or the number to keep, 1 or more.
        init_scale: the first scale, from 2**-126.
        scale_window: finite steps in a row before a growth.
        min_loss_scale: the least scale, or None.
        max_loss_scale: the largest scale; in effect 2**126 or less.

    Returns:
        A `DynamicLossScale`, or a `FixedLossScale` that skips nothing; a
        `VerbatimLossScale` where ``init_scale`` is below ``min_loss_scale``.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.apex_amp(init_scale=2.0**30).init_scale == 2.0**24
        True
        >>> presets.apex_amp(loss_scale=128.0)
        FixedLossScale(loss_scale=128.0, skip_nonfinite=False)

    References:
        `apex/amp/scaler.py at 25.04
        <https://github.com/NVIDIA/apex/blob/25.04/apex/amp/scaler.py>`_; the module was
        removed in 2025
    """
    if loss_scale != "dynamic":
        return FixedLossScale(loss_scale, skip_nonfinite=False)
    highest = ceiling("max_loss_scale", max_loss_scale)
    with named(
        growth_interval="scale_window",
        min_scale="min_loss_scale",
        max_scale="max_loss_scale",
    ):
        return growing(
            init_scale=min(first("init_scale", init_scale), highest),
            growth_interval=scale_window,
            min_scale=0.0 if min_loss_scale is None else min_loss_scale,
            max_scale=highest,
        )
