"""PyTorch: ``torch.amp.GradScaler``."""

from collections.abc import Mapping
from typing import Any

from .._find import get_loss_scale_state
from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import check
from ._build import Growing, growing
from ._saved import Form, restored

_DISABLED = FixedLossScale(1.0, skip_nonfinite=False)

_FORM = Form(
    system="torch.amp.GradScaler",
    source="what `GradScaler.state_dict()` returned",
    fields={
        "scale": "loss_scale",
        "growth_factor": "growth_factor",
        "backoff_factor": "backoff_factor",
        "growth_interval": "growth_interval",
        "_growth_tracker": "growth_tracker",
    },
)


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

    Returns:
        A `DynamicLossScale`, or a `FixedLossScale` if not enabled. See `departures`.

    Examples:
        >>> from optax_lossscale import presets
        >>> presets.torch_grad_scaler().init_scale
        65536.0
    """
    if not check("enabled", enabled):
        return _DISABLED
    del enabled
    return growing(**locals())


def from_torch_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[LossScaleState, Growing | FixedLossScale]:
    """Return the state and the rule that continue a saved ``torch.amp.GradScaler``.

    Args:
        state_dict: what ``GradScaler.state_dict()`` returned.

    Returns:
        The state, and the rule of `torch_grad_scaler` that starts at the saved scale.

    Raises:
        TypeError: if ``state_dict`` is not a dictionary.
        ValueError: if the keys are others, or a value is out of range. A run whose
            scale is 0 or infinite cannot be continued.

    Examples:
        >>> import optax
        >>> import optax_lossscale as ls
        >>> rule = ls.presets.torch_grad_scaler()
        >>> state_dict = ls.presets.to_torch_state_dict(rule.init(), rule)
        >>> state, rule = ls.presets.from_torch_state_dict(state_dict)
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
        >>> opt_state = tx.init(0.0)._replace(scale_state=state)
    """
    if isinstance(state_dict, Mapping) and not state_dict:
        return _DISABLED.init(), _DISABLED
    fields, arguments = _FORM.read(state_dict)
    rule = torch_grad_scaler(fields["loss_scale"], **arguments)
    return restored(rule, fields), rule


def to_torch_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return a state dict for ``torch.amp.GradScaler.load_state_dict``.

    PyTorch saves neither limits nor the counts of skipped steps.

    Args:
        state: whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        What `from_torch_state_dict` takes, with Python numbers. It is empty for
        ``FixedLossScale(1.0, skip_nonfinite=False)``, a scaler that is not enabled.

    Raises:
        ValueError: as `get_loss_scale_state`, or if PyTorch cannot follow the rule.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.DynamicLossScale()
        >>> ls.presets.to_torch_state_dict(rule.init(), rule)["scale"]
        32768.0
    """
    if rule == _DISABLED:
        get_loss_scale_state(state)
        return {}
    return _FORM.write(state, rule, hysteresis=1)
