"""PyTorch: ``torch.amp.GradScaler``."""

from .._rules.fixed import FixedLossScale
from .._validation import check_switch
from ._build import Growing, build_rule


def torch_grad_scaler(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> Growing | FixedLossScale:
    """Return the rule of ``torch.amp.GradScaler``.

    Args:
        init_scale: the first scale, from 2**-126 to 2**126.
        growth_factor: the factor by which the scale grows, above 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, nothing is scaled, checked or skipped.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.torch_grad_scaler().init_scale
        65536.0
    """
    if not check_switch("enabled", enabled, "It decides whether to scale the loss."):
        return FixedLossScale(1.0, skip_nonfinite=False)
    return build_rule(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
