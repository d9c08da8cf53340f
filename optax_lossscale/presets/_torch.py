"""PyTorch: ``torch.amp.GradScaler``."""

from collections.abc import Mapping
from typing import Any, Literal, overload

from .._rules.base import LossScale
from .._rules.fixed import FixedLossScale
from .._state import LossScaleState
from .._validation import check_bool
from ._build import Growing, growing
from ._saved import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_number,
    read_scale,
    restored,
)

_DISABLED = FixedLossScale(1.0, skip_nonfinite=False)


@overload
def torch_grad_scaler(
    init_scale: float = ...,
    growth_factor: float = ...,
    backoff_factor: float = ...,
    growth_interval: int = ...,
    enabled: Literal[True] = ...,
) -> Growing: ...


@overload
def torch_grad_scaler(
    init_scale: float = ...,
    growth_factor: float = ...,
    backoff_factor: float = ...,
    growth_interval: int = ...,
    enabled: bool = ...,
) -> Growing | FixedLossScale: ...


def torch_grad_scaler(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> Growing | FixedLossScale:
    """Return the rule of ``torch.amp.GradScaler``.

    The scale is multiplied by ``growth_factor`` after every ``growth_interval`` finite
    steps in a row, and by ``backoff_factor`` after every non-finite step.

    Departures: the scale stays between 2**-126 and 2**126. In PyTorch it can fall to 0;
    the next infinite gradient then becomes NaN and is applied. If you continue a run
    with a ``growth_interval`` below its count of finite steps, the scale grows
    immediately; PyTorch waits for the next overflow. There is no ``device`` argument.

    Args:
        init_scale: the first scale, from 2**-126 to 2**126.
        growth_factor: the factor by which the scale grows, more than 1.
        backoff_factor: the factor by which the scale backs off, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, nothing is scaled, checked or skipped, as in PyTorch.

    Returns:
        A `DynamicLossScale`, or a `FixedLossScale` if ``enabled`` is False.

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
    check_bool("enabled", enabled, "It decides whether to scale, check and skip.")
    rule = growing(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    return rule if enabled else _DISABLED


def from_torch_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[LossScaleState, Growing | FixedLossScale]:
    """Return the state and the rule that continue a saved ``torch.amp.GradScaler``.

    Args:
        state_dict: what ``GradScaler.state_dict()`` returned: ``scale``,
            ``growth_factor``, ``backoff_factor``, ``growth_interval`` and
            ``_growth_tracker``, or an empty dictionary if it was not enabled.

    Returns:
        The state, and the rule of `torch_grad_scaler` with the saved arguments, whose
        ``init_scale`` is the saved scale.

    Raises:
        TypeError: if ``state_dict`` is not a dictionary.
        ValueError: if ``state_dict`` has other keys, or a value is not a number or out
            of range. A run whose scale is 0 or infinite cannot be continued.

    Examples:
        >>> import optax
        >>> import optax_lossscale as ls
        >>> from optax_lossscale import presets
        >>> state_dict = {
        ...     "scale": 1024.0,
        ...     "growth_factor": 2.0,
        ...     "backoff_factor": 0.5,
        ...     "growth_interval": 2000,
        ...     "_growth_tracker": 1500,
        ... }
        >>> state, rule = presets.from_torch_state_dict(state_dict)
        >>> int(state.growth_tracker), rule.growth_interval
        (1500, 2000)
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
        >>> opt_state = tx.init(0.0)._replace(scale_state=state)
        >>> presets.to_torch_state_dict(opt_state, rule) == state_dict
        True

    References:
        `torch.amp.GradScaler <https://docs.pytorch.org/docs/stable/amp.html>`_
    """
    if isinstance(state_dict, Mapping) and not state_dict:
        return _DISABLED.init(), _DISABLED
    factors = ("growth_factor", "backoff_factor", "growth_interval")
    check_keys(
        state_dict,
        ("scale", *factors, "_growth_tracker"),
        "what `GradScaler.state_dict()` returned",
    )
    scale = read_scale(state_dict, "scale")
    arguments = {name: read_number(state_dict, name) for name in factors}
    rule = torch_grad_scaler(scale, **arguments)
    growth_tracker = read_count(state_dict, "_growth_tracker")
    return restored(rule, loss_scale=scale, growth_tracker=growth_tracker), rule


def to_torch_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return a state dict for ``torch.amp.GradScaler.load_state_dict``.

    PyTorch does not limit the scale and does not count skipped steps, so the rule's
    limits and these counts are lost.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that produced ``state``.

    Returns:
        The five keys of `from_torch_state_dict`, with Python numbers. For
        ``FixedLossScale(1.0, skip_nonfinite=False)``, an empty dictionary, as for a
        scaler that is not enabled.

    Raises:
        ValueError: if PyTorch cannot follow the rule, or ``state`` has no loss scale or
            more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> from optax_lossscale import presets
        >>> rule = ls.DynamicLossScale()
        >>> presets.to_torch_state_dict(rule.init(), rule)["scale"]
        32768.0
    """
    scale, growth_tracker, _ = numbers(state)
    if rule == _DISABLED:
        return {}
    rule = check_follows(rule, "torch.amp.GradScaler", hysteresis=1)
    return {
        "scale": scale,
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": growth_tracker,
    }
