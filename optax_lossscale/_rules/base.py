"""The base class of all rules."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar, cast

import jax
import numpy as np

from .._state import LossScaleState
from .._validation import check_flag, check_magnitude
from .soundness import check_state, is_traced, own_memory, sound

UpdateT = TypeVar("UpdateT", bound=Callable[..., Any])


def compiled(update: UpdateT) -> UpdateT:
    """Compile a rule's ``update`` once per configuration.

    The configuration is compiled in as constants, so an eager update transfers nothing
    from the host. Numbers that were given as arrays are arguments of the program,
    because eager ``optax.inject_hyperparams`` builds a rule with new ones in every
    step. While it traces a number, the rule cannot be hashed, and the update becomes
    part of the caller's program.
    """

    @functools.wraps(update)
    def whole(self: Any, state: Any, *args: Any) -> LossScaleState:
        state = own_memory(self, state)
        new_state = update(self, state, *args)
        return sound(self, new_state, state) if is_traced(self) else new_state

    def rebuilt(kind: Any, rest: Any, numbers: Any, *args: Any) -> LossScaleState:
        return whole(kind(**dict(rest), **numbers), *args)

    of_constants = jax.jit(whole, static_argnums=0)
    of_arguments = jax.jit(rebuilt, static_argnums=(0, 1))

    @functools.wraps(update)
    def checked(self: Any, state: Any, grads_finite: Any, *args: Any) -> Any:
        state = check_state(state)
        check_flag("grads_finite", grads_finite)
        for arg in args:
            check_magnitude("max_magnitude", arg)
        if is_traced(self):
            return whole(self, state, grads_finite, *args)
        if self._given_as_arrays:
            return of_arguments(*_parts(self), state, grads_finite, *args)
        return of_constants(self, state, grads_finite, *args)

    return cast(UpdateT, checked)


def _parts(rule: Any) -> tuple[type, tuple[tuple[str, Any], ...], dict[str, jax.Array]]:
    """Return a rule's class, its constants, and its arrays, put on the device."""
    fields = {name: getattr(rule, name) for name in _field_names(type(rule))}
    numbers = {name: np.asarray(fields.pop(name)) for name in rule._given_as_arrays}
    return type(rule), tuple(fields.items()), jax.device_put(numbers)


class LossScale(abc.ABC):
    """Decide how the loss scale starts and how it changes after each step.

    This is the base class of all rules. A rule is configuration and holds no arrays;
    whatever changes during training is in `LossScaleState`.

    To write your own rule, derive from this class and make it a frozen dataclass. That
    gives it a repr, equality, a hash and ``get_config``. A rule must not define
    ``__call__``, because ``optax.inject_hyperparams`` takes callables for schedules.

    The rules of this package check their numbers when they are created, except while
    ``optax.inject_hyperparams`` traces them. A traced number cannot take the scale out
    of its range, 2**-126 to 2**126: the scale stays as it was instead.

    Attributes:
        skip_nonfinite: whether steps with non-finite gradients are skipped. If False,
            gradients are not checked, and ``update`` is always given True.
        uses_max_magnitude: whether ``update`` takes a third argument, the largest
            absolute value of the gradients, as `max_magnitude` returns it. It is
            computed only for rules that use it.

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
        ...         return state.record(grads_finite)._replace(loss_scale=scale)
        >>> rule = HalvingLossScale()
        >>> float(rule.update(rule.init(), False).loss_scale)
        512.0
    """

    skip_nonfinite: bool = True
    uses_max_magnitude: ClassVar[bool] = False
    _given_as_arrays: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def init(self) -> LossScaleState:
        """Return the state before the first step."""

    @abc.abstractmethod
    def update(
        self, state: LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> LossScaleState:
        """Return the state after a step.

        Args:
            state: the state whose ``loss_scale`` multiplied this step's loss. A
                checkpoint or ``optax.tree.set`` may have left numbers of other types
                in it; the rules of this package convert them.
            grads_finite: one boolean, whether all gradients were finite.

        Raises:
            TypeError: if ``state`` is not a `LossScaleState`.
            ValueError: if ``state`` holds several runs outside of ``jax.vmap``, holds
                no numbers, or belongs to a rule with a different memory; or if
                ``grads_finite`` is not one boolean.
        """

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as a dictionary that JSON can hold.

        Returns:
            The fields by name, plus the name of the class as ``"class_name"``.

        Raises:
            TypeError: if the class is not a dataclass.

        Examples:
            >>> import optax_lossscale as ls
            >>> ls.FixedLossScale(8.0).get_config()
            {'class_name': 'FixedLossScale', 'loss_scale': 8.0, 'skip_nonfinite': True}
        """
        return {
            "class_name": type(self).__name__,
            **{name: getattr(self, name) for name in _field_names(type(self))},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build a rule from its configuration.

        Call ``LossScale.from_config`` for any rule of this package. For your own rule,
        call ``from_config`` on its class.

        Args:
            config: what ``get_config`` returned. ``LossScale.from_config`` reads from
                ``"class_name"`` which rule to build. Called on one rule, the name may
                be missing. Missing fields take their defaults.

        Raises:
            TypeError: if ``config`` is not a mapping.
            ValueError: if ``config`` names another rule, has an argument that the rule
                does not take, or has a value that is out of range.

        Examples:
            >>> import optax_lossscale as ls
            >>> rule = ls.DynamicLossScale(growth_interval=500)
            >>> ls.LossScale.from_config(rule.get_config()) == rule
            True
        """
        if not isinstance(config, Mapping):
            raise TypeError(
                f"`config` must be a dictionary from `get_config`, got {config!r}."
            )
        fields = dict(config)
        rules: Mapping[str, Any] = (
            _package_rules() if cls is LossScale else {cls.__name__: cls}
        )
        name = fields.pop("class_name", cls.__name__)
        if not isinstance(name, str) or name not in rules:
            raise ValueError(
                f"`config['class_name']` must be one of {sorted(rules)}, got {name!r}. "
                "`LossScale.from_config` builds the rules of this package. For your "
                "own rule, call `from_config` on the rule's class."
            )
        rule = rules[name]
        unknown = sorted(fields.keys() - set(_field_names(rule)), key=str)
        if unknown:
            raise ValueError(
                f"`config` for {name} must hold only {_field_names(rule)}, got "
                f"{unknown}. Remove or rename them."
            )
        return rule(**fields)


def _package_rules() -> dict[str, type[LossScale]]:
    package = __name__.partition(".")[0]
    return {
        rule.__name__: rule
        for rule in LossScale.__subclasses__()
        if rule.__module__.partition(".")[0] == package
    }


def _field_names(cls: type[LossScale]) -> list[str]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"{cls.__name__} must be a dataclass to have a configuration. Decorate it "
            "with `@dataclasses.dataclass(frozen=True)`, or override `get_config` and "
            "`from_config`."
        )
    return [field.name for field in dataclasses.fields(cls) if field.init]
