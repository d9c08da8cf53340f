"""The guard that a host may ask whether training has stopped."""

from typing import Any

from ._inspect import get_loss_scale_state
from ._validation import check_count


class LossScaleError(RuntimeError):
    """Raised by `check_loss_scale`: steps are skipped and none is applied.

    Examples:
        >>> import optax_lossscale as ls
        >>> issubclass(ls.LossScaleError, RuntimeError)
        True
    """


def check_loss_scale(state: Any, *, max_consecutive_skips: int = 100) -> None:
    """Raise if too many steps in a row have been skipped.

    It waits for the device, so call it now and then from the host, where you log. A
    compiled step neither waits nor raises.

    Args:
        state: an optimizer state, or whatever `get_loss_scale_state` takes.
        max_consecutive_skips: how many steps in a row may be skipped, 1 or more. A
            scale that starts at 2**15 has come to 1 after 15 of them.

    Returns:
        Nothing.

    Raises:
        LossScaleError: if more steps were skipped since the last one that was applied.
        ValueError: if ``state`` has no loss scale or more than one, or
            ``max_consecutive_skips`` is no count.

    Examples:
        >>> import optax_lossscale as ls
        >>> rule = ls.DynamicLossScale(init_scale=4.0)
        >>> state = rule.init()
        >>> for _ in range(3):
        ...     state = rule.update(state, False)
        >>> ls.check_loss_scale(state)
        >>> ls.check_loss_scale(state, max_consecutive_skips=2)
        Traceback (most recent call last):
        ...
        optax_lossscale._guard.LossScaleError: The last 3 steps were all skipped, ...

    References:
        MindSpore's ``DynamicLossScaleManager`` gives up after more than 1,000
        overflows in a row; DeepSpeed at the first one at the least scale.
    """
    limit = check_count(
        "max_consecutive_skips",
        max_consecutive_skips,
        "It is how many steps in a row may be skipped.",
    )
    scale_state = get_loss_scale_state(state)
    skips = int(scale_state.consecutive_skips)
    if skips > limit:
        raise LossScaleError(
            f"The last {skips} steps were all skipped, more than "
            f"`max_consecutive_skips`={limit}, and {int(scale_state.skipped_steps)} in "
            f"all; the loss scale is {float(scale_state.loss_scale):g}. If it has come "
            "to its floor, no scale cures the gradients: look for a NaN in the data, "
            "the loss or the parameters, or lower the learning rate. If it is still "
            "falling, start from a lower one."
        )
