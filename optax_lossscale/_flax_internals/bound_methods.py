"""Wrap methods of NNX objects, so that NNX still sees the object."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from .nnx_objects import is_object


def wraps(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return ``functools.wraps(fun)``, after which a method of an NNX object stays one.

    Since Flax 0.12.1, NNX refuses to transform a bound method, because it would not see
    the module. It must also see the method that we wrap. See
    https://github.com/google/flax/issues/5053.
    """
    method = fun
    while isinstance(method, functools.partial):
        method = method.func

    def wrapped(wrapper: Callable[..., Any]) -> Any:
        wrapper = functools.wraps(fun, updated=())(wrapper)
        if not (inspect.ismethod(method) and is_object(method.__self__)):
            return wrapper

        @functools.wraps(wrapper)
        def unbound(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs)

        signature = inspect.signature(fun)
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [self, *signature.parameters.values()]
        vars(unbound)["__signature__"] = signature.replace(parameters=parameters)
        return types.MethodType(unbound, method.__self__)

    return wrapped
