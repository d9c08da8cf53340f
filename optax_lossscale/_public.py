"""Set the ``__module__`` of public names to the module that exports them."""

import inspect
import sys
from collections.abc import Iterable


def set_module(module_name: str, names: Iterable[str]) -> None:
    """Make errors, pickles, ``help`` and doctests show the module that users import."""
    module = sys.modules[module_name]
    for name in names:
        member = getattr(module, name)
        methods = vars(member).values() if inspect.isclass(member) else ()
        # A class method holds its function.
        for x in (member, *(getattr(x, "__func__", x) for x in methods)):
            if inspect.isclass(x) or inspect.isfunction(x):
                x.__module__ = module_name
