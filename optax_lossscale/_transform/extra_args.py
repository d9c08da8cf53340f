"""Accept any Optax transformation, and pass it only the arguments that it takes."""

import inspect
from typing import Any

import optax

from .._rules.base import LossScale
from .._validation import describe
from .._warn import warn


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


def with_extra_args(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation accept extra arguments, and drop those it does not take."""
    # Inspect parameters, not the type: optax.MultiSteps takes extra arguments but has
    # another type, and optax.contrib.sam has the type but takes only one of them.
    parameters = list(inspect.signature(inner.update).parameters.values())
    known = frozenset(p.name for p in parameters[3:])
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def is_taken(name: str) -> bool:
        # A line search would pass `grads_finite` on to the loss.
        return name in known or (takes_all and name != "grads_finite")

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        for name in {"loss", "values"} & extra_args.keys() - known:
            if "value" not in extra_args:
                warn(
                    f"`update` is given `{name}`, which does not decide whether the "
                    f"step is applied. Pass `value={name}` if it should."
                )
        taken = {name: x for name, x in extra_args.items() if is_taken(name)}
        try:
            return inner.update(updates, state, params, **taken)
        except TypeError as error:
            # A member of a chain may refuse the loss, which it was never meant for.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            del taken["value"]
            return inner.update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
