"""Check the wrapped transformation, and pass it only the arguments that it takes."""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from .._rules.base import LossScale
from .._validation import describe, warn

# Extra arguments that sound as if they decided whether a step is applied, and those
# that do.
_DECIDING = {
    **{x: f"value={x}" for x in ("loss", "values", "loss_value", "losses")},
    **{
        x: f"grads_finite={x}"
        for x in ("finite", "is_fin", "is_finite", "grads_are_finite")
    },
    "found_inf": "grads_finite=~found_inf",
}


def check_inner(inner: Any, wrapper: str) -> None:
    rule = "`inner` must be an Optax gradient transformation, got "
    if isinstance(inner, LossScale):
        raise TypeError(
            f"{rule}the rule {inner!r}. The optimizer comes first: "
            "`with_loss_scaling(optimizer, rule)`."
        )
    functions = (getattr(inner, name, None) for name in ("init", "update"))
    if isinstance(inner, type) or not all(map(callable, functions)):
        advice = f"Pass an optimizer, called as in `{wrapper}(optax.adam(1e-3))`."
        raise TypeError(f"{rule}{describe(inner)}. {advice}")


def filter_for(
    inner: optax.GradientTransformation, *, warns: bool = False
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that drops the extra arguments that ``inner`` does not take.

    If ``warns``, it reports those that were probably meant for `with_loss_scaling`.

    ``optax.with_extra_args_support`` looks at the type of a transformation instead. But
    optax.MultiSteps, which takes extra arguments, does not have that type, and
    optax.contrib.sam, which takes only one, has it.
    """
    parameters = list(inspect.signature(inner.update).parameters.values())
    known = frozenset(p.name for p in parameters[3:])
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def drop_unknown(extra_args: dict[str, Any]) -> dict[str, Any]:
        for name in _DECIDING.keys() & extra_args.keys() - known:
            deciding = _DECIDING[name]
            if warns and deciding.partition("=")[0] not in extra_args:
                warn(
                    f"`update` is given `{name}`, which does not decide whether the "
                    f"step is applied. Pass `{deciding}` if it should."
                )
        # A line search passes all unknown arguments on to the loss.
        taken = extra_args.keys() - {"grads_finite"} if takes_all else set()
        return {k: x for k, x in extra_args.items() if k in taken | known}

    return drop_unknown
