"""The state of the loss scale, which every rule updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._tree import as_strongly_typed
from ._validation import check_flag, describe

# How many skips in a row the recent share of skips counts, unless the scale is fixed.
MOST_COUNTED_SKIPS = 25
# The dtypes of all fields of a state except `rule_state`.
_INT = jnp.int32
_DTYPES = (jnp.float32, _INT, _INT, jnp.bool_, _INT, _INT, jnp.float32)


class LossScaleState(NamedTuple):
    """The loss scale and its counters, as a part of the optimizer state.

    Every field except ``rule_state`` is a strongly typed array of shape ``()``. The
    names of the fields are unique among Optax states, so
    ``optax.tree.get(opt_state, "loss_scale")`` works in any chain.

    Attributes:
        loss_scale: float32, the scale that multiplies the next loss.
        growth_tracker: int32, the number of finite steps in a row that count toward the
            next growth.
        hysteresis_tracker: int32, the number of non-finite steps until the scale is
            lowered.
        is_fixed: bool, whether the rule never changes the scale.
        skipped_steps: int32, the number of skipped steps in total, up to 2**31 - 1.
        consecutive_skips: int32, the number of skipped steps since the last applied
            one, up to 2**31 - 1.
        skip_rate: float32, the recent share of skipped steps, an exponential moving
            average over about 100 steps.
        rule_state: other values that a rule remembers, a ``NamedTuple`` of strongly
            typed arrays. For most rules it is an empty tuple, which adds no leaf.

    Examples:
        >>> import optax_lossscale as ls
        >>> state = ls.HeadroomLossScale().init()
        >>> float(state.loss_scale), int(state.skipped_steps), state.rule_state._fields
        (32768.0, 0, ('max_magnitude',))
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    is_fixed: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    skip_rate: jax.Array
    rule_state: Any = ()

    @property
    def applied(self) -> jax.Array:
        """Whether the last step was applied; True before the first one."""
        # A comparison with 0 would transfer it to the device.
        return jnp.logical_not(self.consecutive_skips)

    @classmethod
    def create(
        cls,
        loss_scale: "jax.typing.ArrayLike",
        hysteresis: "jax.typing.ArrayLike" = 1,
        rule_state: Any = (),
        *,
        is_fixed: bool = False,
    ) -> "LossScaleState":
        """Return the state before the first step, for the ``init`` of your own rule.

        Args:
            loss_scale: the first scale.
            hysteresis: the first ``hysteresis_tracker``.
            rule_state: other values that the rule remembers.
            is_fixed: whether the rule never changes the scale.

        Returns:
            A state in which all other counters are 0.

        Examples:
            >>> import optax_lossscale as ls
            >>> ls.LossScaleState.create(128.0).loss_scale
            Array(128., dtype=float32)
        """
        numbers = (loss_scale, 0, hysteresis, is_fixed, 0, 0, 0.0)
        return cls._make([*map(jnp.asarray, numbers, _DTYPES), rule_state])

    def record(self, applied: "jax.typing.ArrayLike") -> "LossScaleState":
        """Count a step as applied or skipped, for a rule without `with_loss_scaling`.

        Args:
            applied: one boolean; False if the step is skipped.

        Returns:
            The state with new values of ``skipped_steps``, ``consecutive_skips`` and
            ``skip_rate``.

        Raises:
            ValueError: if ``applied`` is not one boolean.

        Examples:
            >>> import optax_lossscale as ls
            >>> state = ls.LossScaleState.create(128.0).record(False).record(False)
            >>> int(state.skipped_steps), int(state.consecutive_skips)
            (2, 2)
        """
        check_flag("applied", applied)
        applied = jnp.asarray(applied)
        skipped_steps = optax.safe_increment(self.skipped_steps)
        consecutive_skips = optax.safe_increment(self.consecutive_skips)
        decayed = 0.99 * self.skip_rate
        # A first scale that is far too high is no mistake, and falls unless it is
        # fixed. It raises the rate to 1 - 0.99**25, or 0.22, and the guard raises at
        # 0.25.
        counts = self.is_fixed | (consecutive_skips <= MOST_COUNTED_SKIPS)
        skipped_rate = jnp.where(counts, decayed + 0.01, self.skip_rate)
        return self._replace(
            skipped_steps=jnp.where(applied, self.skipped_steps, skipped_steps),
            consecutive_skips=jnp.where(applied, 0, consecutive_skips),
            skip_rate=jnp.where(applied, decayed, skipped_rate),
        )


def with_counts(state: LossScaleState, counted: LossScaleState) -> LossScaleState:
    """Return a state with the counts of skipped steps of another."""
    names = "skipped_steps", "consecutive_skips", "skip_rate"
    return state._replace(**{name: getattr(counted, name) for name in names})


class WithLossScalingState(NamedTuple):
    """The optimizer state of `with_loss_scaling` and `skip_nonfinite`.

    Attributes:
        scale_state: the loss scale and its counters.
        inner_state: the state of the wrapped transformation.

    Examples:
        Wrap the optimizer of a run that started without loss scaling:

        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> params = {"w": jnp.zeros(3)}
        >>> old_state = optax.adam(1e-3).init(params)
        >>> tx = ls.with_loss_scaling(optax.adam(1e-3))
        >>> opt_state = tx.init(params)._replace(inner_state=old_state)
    """

    scale_state: LossScaleState
    inner_state: optax.OptState


class MasterWeightsState(NamedTuple):
    """The optimizer state of `with_master_weights`.

    Attributes:
        master_weights: a copy, in the ``dtype`` of `with_master_weights`, of each
            parameter with a narrower dtype; an ``optax.MaskedNode`` for each other one.
        inner_state: the state of the wrapped transformation.

    Examples:
        Start from weights that were saved in float32:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> saved = {"w": jnp.array([0.1, 0.1, 0.1])}
        >>> params = jax.tree.map(lambda p: p.astype(jnp.float16), saved)
        >>> tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(1e-3)))
        >>> opt_state = optax.tree.set(tx.init(params), master_weights=saved)
        >>> optax.tree.get(opt_state, "master_weights")
        {'w': Array([0.1, 0.1, 0.1], dtype=float32)}
    """

    master_weights: optax.Params
    inner_state: optax.OptState


def check_state(state: Any) -> LossScaleState:
    """Return the state of one run in its own dtypes, or raise."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "`state` must be a LossScaleState, as the rule's `init` returns it, got "
            f"{describe(state)}. `get_loss_scale_state` returns the one inside an "
            "optimizer state."
        )
    state = canonical(state)
    for name, x in zip(state._fields[:-1], state, strict=False):
        if x.shape != ():
            raise ValueError(
                f"`state` must hold the loss scale of one run, got {describe(x)} for "
                f"`{name}`. For an ensemble, call this inside `jax.vmap`, or pass one "
                "member: `jax.tree.map(lambda x: x[0], state)`."
            )
    return state


def canonical(state: LossScaleState) -> LossScaleState:
    """Return a state in which each field has the dtype that it is declared with.

    ``optax.tree.set`` puts Python numbers into a state. Casting a whole optimizer state
    to float16 makes the scale float16, in which 2**16 is infinite.
    """
    for name, x in zip(state._fields[:-1], state, strict=False):
        if not isinstance(x, int | float | np.generic | np.ndarray | jax.Array):
            raise ValueError(
                f"`state` must hold numbers, got {describe(x)} for `{name}`. Pass what "
                "`init(params)` returns, or a state restored from a checkpoint."
            )
    # Keep arrays that have their type: notes recognize them by identity.
    fields = [
        x if isinstance(x, jax.Array) and _is_of(x, dtype) else jnp.asarray(x, dtype)
        for x, dtype in zip(state, _DTYPES, strict=False)
    ]
    rule_state = jax.tree.map(as_strongly_typed, state.rule_state)
    return LossScaleState._make([*fields, rule_state])


def _is_of(x: jax.Array, dtype: Any) -> bool:
    return x.dtype == dtype and not x.weak_type
