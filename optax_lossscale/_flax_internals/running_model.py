"""The variables that layers of a Linen or Haiku model change while it runs."""

import contextlib
import sys
from typing import Any


def is_initializing() -> bool:
    """Return whether a Linen or Haiku model is making its parameters.

    They must not be traced separately: the model would keep the tracers.
    """
    scope, haiku = _linen_scope(), _haiku()
    if scope is not None and scope.get_flag("initializing", False):
        return True
    return haiku is not None and haiku.running_init()


def model_state() -> tuple[Any, Any]:
    """Return the variables that layers of a running Linen or Haiku model may change.

    In Haiku, these are the state and the random keys.
    """
    scope, haiku = _linen_scope(), _haiku()
    return (
        None if scope is None else scope.root.mutable_variables(),
        None if haiku is None else _stateful().internal_state(params=False),
    )


def set_model_state(state: tuple[Any, Any]) -> None:
    variables, haiku_state = state
    if variables is not None:
        _write(_linen_scope().root.mutable_variables(), variables)
    if haiku_state is not None:
        _stateful().update_internal_state(haiku_state)


def traced() -> Any:
    """Announce the trace that follows to Haiku, like its ``hk.remat``."""
    base = sys.modules["haiku._src.base"] if _haiku() else contextlib
    return getattr(base, "push_jax_trace_level", contextlib.nullcontext)()


def _write(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, x in new.items():
        if isinstance(x, dict):
            _write(old[name], x)
        else:
            old[name] = x


def _linen_scope() -> Any:
    """Return the scope of the Linen module that runs now, or None."""
    linen = sys.modules.get("flax.linen")
    module = linen and linen.module._context.module_stack[-1]
    return None if module is None else module.scope


def _haiku() -> Any:
    """Return Haiku inside of ``hk.transform``, and None elsewhere."""
    if haiku := sys.modules.get("haiku"):
        with contextlib.suppress(ValueError):
            haiku.running_init()
            return haiku
    return None


def _stateful() -> Any:
    return sys.modules["haiku._src.stateful"]  # Haiku deletes its attribute `_src`
