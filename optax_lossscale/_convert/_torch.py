"""PyTorch and Megatron-LM."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import presets
from .._loss_scale import FixedLossScale, LossScale
from .._state import LossScaleState
from ._common import (
    check_follows,
    check_keys,
    numbers,
    read_count,
    read_scale,
    restored,
)

_DISABLED = FixedLossScale(1.0, skip_nonfinite=False)


def from_torch_state_dict(d: Mapping[str, Any]) -> tuple[LossScaleState, LossScale]:
    """Go on where a ``torch.amp.GradScaler`` stopped.

    Args:
        d: what ``GradScaler.state_dict()`` returned: ``scale``, ``growth_factor``,
            ``backoff_factor``, ``growth_interval`` and ``_growth_tracker``, or nothing
            if it was not enabled.

    Returns:
        The state, and the rule of `presets.torch_grad_scaler` with those factors, of
        which the ``init_scale`` is the scale saved.

    Raises:
        TypeError: if ``d`` is no dictionary.
        ValueError: if its keys are others, or a value is out of range; a scale of 0 or
            infinity belongs to a run that is lost.

    Examples:
        >>> import optax
        >>> import optax_lossscale as ls
        >>> d = {
        ...     "scale": 1024.0,
        ...     "growth_factor": 2.0,
        ...     "backoff_factor": 0.5,
        ...     "growth_interval": 2000,
        ...     "_growth_tracker": 1500,
        ... }
        >>> state, rule = ls.from_torch_state_dict(d)
        >>> int(state.growth_tracker), rule.growth_interval
        (1500, 2000)
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
        >>> opt_state = tx.init(0.0)._replace(scale_state=state)
        >>> ls.to_torch_state_dict(opt_state, rule) == d
        True

    References:
        `torch.amp.GradScaler <https://docs.pytorch.org/docs/stable/amp.html>`_
    """
    if isinstance(d, Mapping) and not d:
        return _DISABLED.init(), _DISABLED
    factors = ("growth_factor", "backoff_factor", "growth_interval")
    check_keys(
        d, ("scale", *factors, "_growth_tracker"), "what `GradScaler.state_dict()` gave"
    )
    scale = read_scale(d, "scale")
    rule = presets.torch_grad_scaler(scale, **{name: d[name] for name in factors})
    growth_tracker = read_count(d, "_growth_tracker")
    return restored(rule, loss_scale=scale, growth_tracker=growth_tracker), rule


def to_torch_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return what ``torch.amp.GradScaler.load_state_dict`` takes.

    PyTorch has no limits for the scale, and does not count skipped steps: these stay
    behind.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that made it.

    Returns:
        The five keys of `from_torch_state_dict`, with Python's own numbers. For
        ``FixedLossScale(1.0, skip_nonfinite=False)`` nothing, as for a scaler that is
        not enabled.

    Raises:
        ValueError: if PyTorch could not follow the rule, or ``state`` has no loss scale
            or more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.DynamicLossScale()
        >>> ls.to_torch_state_dict(rule.init(), rule)["scale"]
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


def from_megatron_state_dict(
    d: Mapping[str, Any], **arguments: Any
) -> tuple[LossScaleState, LossScale]:
    """Go on where Megatron-LM's ``DynamicGradScaler`` stopped.

    Args:
        d: what its ``state_dict()`` returned: ``scale`` (one element), and
            ``growth_tracker`` and ``hysteresis_tracker``.
        arguments: those of `presets.megatron`, which Megatron-LM does not save.

    Returns:
        The state, and the rule of `presets.megatron`.

    Raises:
        TypeError: if ``d`` is no dictionary, or an argument is unknown.
        ValueError: if its keys are others, or a value is out of range.

    Examples:
        >>> import numpy as np
        >>> import optax_lossscale as ls
        >>> scale = np.array([65536.0], np.float32)
        >>> d = {"scale": scale, "growth_tracker": 7, "hysteresis_tracker": 1}
        >>> state, rule = ls.from_megatron_state_dict(d, growth_interval=500)
        >>> ls.to_megatron_state_dict(state, rule) == d
        True

    References:
        `megatron/core/optimizer/grad_scaler.py
        <https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/grad_scaler.py>`_
    """
    trackers = ("growth_tracker", "hysteresis_tracker")
    check_keys(d, ("scale", *trackers), "what `DynamicGradScaler.state_dict()` gave")
    rule = presets.megatron(**arguments)
    counts = {name: read_count(d, name) for name in trackers}
    return restored(rule, loss_scale=read_scale(d, "scale"), **counts), rule


def to_megatron_state_dict(state: Any, rule: LossScale) -> dict[str, Any]:
    """Return what Megatron-LM's ``DynamicGradScaler.load_state_dict`` takes.

    The scale has to be made a tensor first, with ``torch.from_numpy``. Megatron-LM has
    no ceiling: that of the rule stays behind, like the counts of skipped steps.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        rule: the rule that made it.

    Returns:
        The keys of `from_megatron_state_dict`: the scale as a float32 array of shape
        ``(1,)``, the trackers as Python's own numbers.

    Raises:
        ValueError: if Megatron-LM could not follow the rule, or ``state`` has no loss
            scale or more than one.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.presets.megatron()
        >>> ls.to_megatron_state_dict(rule.init(), rule)["hysteresis_tracker"]
        2
    """
    scale, growth_tracker, hysteresis_tracker = numbers(state)
    if getattr(rule, "hysteresis", None) == 1:
        check_follows(rule, "Megatron-LM")  # the kinds of refill do not differ then
    else:
        check_follows(rule, "Megatron-LM", hysteresis_refill="growth")
    return {
        "scale": np.array([scale], np.float32),
        "growth_tracker": growth_tracker,
        "hysteresis_tracker": hysteresis_tracker,
    }
