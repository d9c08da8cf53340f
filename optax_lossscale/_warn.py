"""Warn at the line of the user."""

import sys
import warnings

# Frames of these stand between the line of the user and the reason.
_SKIPPED = {__name__.partition(".")[0], "jax", "optax", "flax", "equinox", "contextlib"}


def warn(message: str) -> None:
    """Warn at the first line outside of this package and of those that call it back."""
    level, frame = 1, sys._getframe()
    while frame.f_back and _package(frame.f_globals) in _SKIPPED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    # Code that is run by `exec` may have no name.
    return str(names.get("__name__")).partition(".")[0]
