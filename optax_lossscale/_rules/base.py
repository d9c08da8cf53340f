"""The rules' common base."""

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
    """Compile a rule's ``update`` once for each configuration.

    The configuration enters the program as constants, so that an eager update moves
    nothing from the host. Numbers that were arrays are arguments of the program:
    eager ``optax.inject_hyperparams`` makes a rule with others in every step. While
    it traces one, the rule has no hash to compile for, and the caller's program takes
    the update in.
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
    """Return a rule's class, its constants, and on the device what were arrays."""
    fields = {name: getattr(rule, name) for name in _field_names(type(rule))}
    numbers = {name: np.asarray(fields.pop(name)) for name in rule._given_as_arrays}
    return type(rule), tuple(fields.items()), jax.device_put(numbers)


class LossScale(abc.ABC):
    """A rule: what the loss scale is at first, and what each step makes of it.

    A rule is configuration and holds no arrays; what changes is in
    `LossScaleState`. Derive from it for a rule of your own, as a frozen dataclass,
    which gives it a repr, equality, a hash and ``get_config``. A rule must not define
    ``__call__``: ``optax.inject_hyperparams`` takes callables for schedules.

    The numbers of a rule are checked when it is made, except while
    ``optax.inject_hyperparams`` traces them. Traced numbers never take a rule of this
    package out of its range, 2**-126 to 2**126: the scale then stays as it was.

    Attributes:
        skip_nonfinite: whether a step with non-finite gradients is skipped. If not,
            gradients are not checked either, and ``update`` is always given True.
        uses_max_magnitude: whether ``update`` takes a third argument, the largest
            absolute value of the gradients, as `max_magnitude` returns it. It is
            computed only for rules that ask.

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
            state: the state whose ``loss_scale`` multiplied this step's loss. Numbers
                of other types, as a checkpoint or ``optax.tree.set`` may leave, are
                converted by the rules of this package.
            grads_finite: one boolean, whether all gradients were finite.

        Raises:
            TypeError: if ``state`` is no LossScaleState.
            ValueError: if ``state`` is that of several runs outside of ``jax.vmap``,
                has no numbers in it or belongs to a rule that remembers other things,
                or ``grads_finite`` is not one boolean.
        """

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as a dictionary that JSON can hold.

        Returns:
            The fields by name, and the name of the class as ``"class_name"``.

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
        """Build the rule that ``get_config`` described.

        ``LossScale.from_config`` restores the rules of this package. A rule of your own
        restores itself: call ``from_config`` on its class.

        Args:
            config: what ``get_config`` returned. Called on ``LossScale``, its
                ``"class_name"`` says which rule to build; called on one rule, the
                name may be missing. Fields left out take their defaults.

        Raises:
            TypeError: if ``config`` is not a mapping.
            ValueError: if it names another rule, has an argument that the rule does not
                take, or has a value that the rule refuses.

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
                "`LossScale.from_config` restores the rules of this package; for "
                "another one call `from_config` on the rule's own class."
            )
        rule = rules[name]
        unknown = sorted(fields.keys() - set(_field_names(rule)), key=str)
        if unknown:
            raise ValueError(
                f"`config` for {name} must hold only {_field_names(rule)}, got "
                f"{unknown}. Remove them, or rename them to the arguments meant."
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
