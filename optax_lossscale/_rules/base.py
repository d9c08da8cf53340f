"""The base class of all rules."""

import abc
import dataclasses
import functools
import inspect
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import optax

from .._axes import AxisName
from .._dtypes import is_inexact
from .._finite import finite_max_magnitude
from .._state import LossScaleState, check_state, with_counts
from .._tree import cast_like, mismatch, select
from .._validation import (
    check_concrete,
    check_flag,
    check_order,
    describe,
)
from .fields import check_field


def check_fields(rule: Any) -> None:
    """Check the fields of a frozen rule, and that its limits ascend."""
    advice = (
        "Build a rule outside of compiled functions. To change it during training, "
    )
    advice += "build another one, and continue with the same `opt_state`."
    for field in dataclasses.fields(rule):
        check_concrete(field.name, getattr(rule, field.name), advice)
        value = check_field(field.name, getattr(rule, field.name))
        object.__setattr__(rule, field.name, value)
    limits = ("min_scale", "init_scale", "max_scale")
    check_order(**{x: getattr(rule, x) for x in limits if hasattr(rule, x)})


# Equal rules share a program. Their numbers are its constants, so an eager update
# transfers nothing from the host.
compile_for_rule = functools.partial(jax.jit, static_argnums=0)

_in_scope = jax.named_scope("optax_lossscale_rule")  # shown by a profile


class LossScale(abc.ABC):
    """The base class of rules, which choose the first loss scale and each next one.

    A rule is configuration: its fields are Python numbers, fixed when it is built.
    Whatever changes during training is in `LossScaleState`.

    To write your own rule, derive from this class and make it a frozen dataclass, which
    gives it a repr, equality, a hash and ``get_config``. Do not define ``__call__``,
    because ``optax.inject_hyperparams`` would take the rule for a schedule.

    Return ``state._replace(loss_scale=...)`` from ``update``. The wrapper
    `with_loss_scaling` counts the skipped steps. Limit the scale: a scale that has
    become 0 stays 0. Keep everything else that the rule must remember in
    ``rule_state``. In a step whose ``value`` is not finite, the result of ``update`` is
    not used.

    Attributes:
        skip_nonfinite: whether steps with non-finite gradients are skipped. If False,
            gradients are not checked, and ``update`` is always given True.
        uses_max_magnitude: whether ``update`` takes a third argument, the largest
            absolute value of the gradients; it is 0 if the step is skipped.

    Examples:
        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> @dataclasses.dataclass(frozen=True)
        ... class HalvingLossScale(ls.LossScale):
        ...     init_scale: float = 1024.0
        ...
        ...     def init(self):
        ...         return ls.LossScaleState.create(self.init_scale)
        ...
        ...     def update(self, state, grads_finite):
        ...         scale = jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale
        ...         return state._replace(loss_scale=jnp.maximum(scale, 1.0))
        >>> rule = HalvingLossScale(1.5)
        >>> float(rule.update(rule.init(), False).loss_scale)
        1.0
    """

    skip_nonfinite: bool = True
    uses_max_magnitude: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self) -> LossScaleState:
        """Return the state before the first step."""

    @abc.abstractmethod
    def update(
        self,
        state: LossScaleState,
        grads_finite: "jax.typing.ArrayLike",
        *args: Any,
        **kwargs: Any,
    ) -> LossScaleState:
        """Return the state after a step.

        Args:
            state: the state whose ``loss_scale`` multiplied this step's loss. Its
                fields may be Python numbers, as after ``optax.tree.set``.
            grads_finite: one boolean, whether all gradients were finite.

        Raises:
            TypeError: if ``state`` is not a `LossScaleState`.
            ValueError: if ``state`` holds several runs outside of ``jax.vmap``, holds
                no numbers, or has the ``rule_state`` of another rule; or if
                ``grads_finite`` is not one boolean.
        """

    def get_config(self) -> dict[str, Any]:
        """Return the fields by name, and the class as ``"class_name"``, for JSON.

        Raises:
            TypeError: if the class is not a dataclass.

        Examples:
            >>> import optax_lossscale as ls
            >>> ls.FixedLossScale(8.0).get_config()
            {'class_name': 'FixedLossScale', 'loss_scale': 8.0, 'skip_nonfinite': True}
        """
        rule: Any = self
        return {
            "class_name": type(self).__name__,
            **{x.name: getattr(self, x.name) for x in dataclasses.fields(rule)},
        }

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Build a rule from its configuration.

        ``LossScale.from_config`` builds any rule that derives from `LossScale`. On
        another class, ``from_config`` builds only rules of this class.

        Args:
            config: the result of ``get_config``, as a dict or another object with
                ``keys`` and ``[]``, such as ``wandb.config``. Missing fields take their
                defaults. Only ``LossScale.from_config`` needs the ``"class_name"``.

        Raises:
            ValueError: if ``config`` names an unknown rule or a rule of another class,
                if several classes have the name, or if a value is out of range.
            TypeError: if ``config`` is not a mapping, or has a field that the rule does
                not take.

        Examples:
            >>> import optax_lossscale as ls
            >>> rule = ls.DynamicLossScale(growth_interval=500)
            >>> ls.LossScale.from_config(rule.get_config()) == rule
            True
        """
        if not (hasattr(config, "keys") and hasattr(config, "__getitem__")):
            raise TypeError(
                "`config` must be a mapping, as `get_config` returns it, got "
                f"{describe(config)}."
            )
        fields = dict(config)
        name = fields.pop("class_name", None if cls is LossScale else cls.__name__)
        classes = [*_subclasses(cls), cls]
        # A class that is defined again, as in a notebook, replaces the earlier one.
        rules = {_full_name(x): x for x in classes if not inspect.isabstract(x)}
        named = {full: x for full, x in rules.items() if x.__name__ == name}
        if not named:
            names = sorted({x.__name__ for x in rules.values()})
            raise ValueError(
                f"`config['class_name']` must be one of {names}, got {name!r}. "
                "Add the name, call `from_config` of the class, or import the class."
            )
        if len(named) > 1 and cls not in named.values():
            raise ValueError(
                "`config['class_name']` must be the name of one class, got "
                f"{name!r}, which is the name of {sorted(named)}. Call `from_config` "
                "of the one that you mean."
            )
        return named.get(_full_name(cls), [*named.values()][0])(**fields)


def _subclasses(cls: Any) -> list[Any]:
    """Return the subclasses of a class, and theirs, at every depth."""
    return [x for sub in cls.__subclasses__() for x in (*_subclasses(sub), sub)]


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def check_rule(rule: Any) -> None:
    if not isinstance(rule, LossScale):
        advice = "Pass one, such as `FixedLossScale(128.0)`, or one from `presets`."
        is_rule = inspect.isclass(rule) and issubclass(rule, LossScale)
        if is_rule or inspect.isfunction(rule):
            advice = f"If this makes one, call it: `{rule.__name__}(...)`."
        raise TypeError(
            f"`rule` must be an instance of LossScale, got {describe(rule)}. {advice}"
        )
    try:
        hash(rule)
    except TypeError as error:
        raise TypeError(
            f"`rule` must be hashable, got {describe(rule)}. JAX caches compiled "
            "functions by rule. Make its class a `dataclasses.dataclass(frozen=True)` "
            "whose fields are plain numbers."
        ) from error
    given = ["state", "grads_finite", "max_magnitude"][: 2 + rule.uses_max_magnitude]
    try:
        inspect.signature(rule.update).bind(*given)
    except TypeError as error:
        raise TypeError(
            f"`rule` must have an `update({', '.join(given)})` if its "
            f"`uses_max_magnitude` is {rule.uses_max_magnitude}, got {rule!r}: {error}."
        ) from None


def checked_state(rule: LossScale, state: Any, grads_finite: Any) -> LossScaleState:
    """Check the arguments of a rule's ``update``, and return the state in its types."""
    check_flag("grads_finite", grads_finite)
    return matching_state(rule, state)


def matching_state(rule: LossScale, state: Any) -> LossScaleState:
    """Return the state of one run in its types, or raise if the rule cannot use it.

    A rule without a ``rule_state`` takes and returns the ``rule_state`` of any other
    rule, so that a run may switch to it and back.
    """
    state = check_state(state)
    own = jax.eval_shape(rule.init).rule_state
    if jax.tree.leaves(own) and (found := mismatch(state.rule_state, own)):
        path, new, old = found
        raise ValueError(
            f"`state` must have the `rule_state` of {rule!r}, but has {new} at {path}, "
            f"where it needs {old}. To switch to another rule, start with its first "
            "state: `opt_state._replace(scale_state=rule.init())`."
        )
    return _take_over(rule, state)


@_in_scope
def next_state(
    rule: LossScale,
    state: LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    grads: optax.Updates,
    axis_name: AxisName | None,
) -> LossScaleState:
    """Return the rule's next state, in its own types.

    ``state`` is one that ``matching_state`` returned.
    """
    args = [grads_finite]
    if rule.uses_max_magnitude:
        # Without a derivative, which would be NaN in a skipped step.
        leaves = [*filter(is_inexact, jax.tree.leaves(jax.lax.stop_gradient(grads)))]
        args.append(_magnitude_if(grads_finite, leaves, axis_name))
    fields = dict(getattr(rule, "__dict__", {}))
    # The state is checked already. A class with an `update` of the user's own has no
    # other, even if it is derived from a class that has.
    owner = next(cls for cls in type(rule).__mro__ if "update" in vars(cls))
    compiled = vars(owner).get("_compiled")
    new_state = compiled(rule, state, *args) if compiled else rule.update(state, *args)
    if changed := [x for x in fields if fields[x] is not getattr(rule, x, None)]:
        raise TypeError(
            f"`rule` must not change in its `update`, got another `{changed[0]}` in "
            f"{rule!r}: `update` runs once, when it is traced. Keep what changes in "
            "`state.rule_state`, and make the rule a frozen dataclass."
        )
    if found := mismatch(new_state, state):
        path, new, old = found
        raise ValueError(
            "`rule` must have an `update` that keeps the structure and the shapes of "
            f"the state, got {new} at {path}, where it was given {old}, from {rule!r}. "
            "Return `state._replace(loss_scale=...)`."
        )
    # A user's rule may return a Python number for a counter.
    return cast(LossScaleState, cast_like(new_state, state))


# Compiled: with `jax_debug_nans`, an eager maximum of NaN would raise.
@functools.partial(jax.jit, static_argnames="axis_name")
def _magnitude_if(
    finite: jax.typing.ArrayLike, leaves: list[jax.Array], axis_name: AxisName | None
) -> jax.Array:
    """Return the largest magnitude of gradients that are finite, or else 0."""
    return jnp.where(finite, finite_max_magnitude(leaves, axis_name), 0)


@_in_scope
@compile_for_rule
def _take_over(rule: LossScale, state: LossScaleState) -> LossScaleState:
    """Return the rule's first state if the scale is or was fixed, else the state.

    A moving rule starts from its own first scale if it follows a fixed rule, or if the
    scale is not a positive number, for example after the whole state was set to zeros.
    The counters of skipped steps continue.
    """
    own = rule.init()
    remembers = bool(jax.tree.leaves(own.rule_state))
    rule_state = own.rule_state if remembers else state.rule_state
    own = with_counts(own._replace(rule_state=rule_state), state)
    own = cast_like(own, state)
    is_scale = (state.loss_scale > 0) & (state.loss_scale < jnp.inf)
    is_own = state.is_fixed | own.is_fixed | ~is_scale
    return cast(LossScaleState, select(is_own, own, state))
