"""The state that every rule acts on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._validation import check_flag, describe


class LossScaleState(NamedTuple):
    """What a rule knows about the run so far.

    Every field but ``memory`` is a strongly typed array of shape ``()``. The names are
    unique among optax states, so ``optax.tree.get(opt_state, "loss_scale")`` works in
    any chain.

    Attributes:
        loss_scale: float32, what the next loss is multiplied by.
        growth_tracker: int32, finite steps in a row that count towards a growth.
        hysteresis_tracker: int32, non-finite steps left until the scale backs off;
            -1 where it never does.
        grads_finite: bool, whether the last step was applied: its gradients were
            finite, and whatever else was asked to be.
        skipped_steps: int32, steps skipped in all; saturates.
        consecutive_skips: int32, steps skipped since one was applied; saturates.
        memory: what one rule remembers beside these, a ``NamedTuple`` of strongly typed
            arrays. An empty tuple for rules that need no more, which adds no leaf.

    Examples:
        >>> import optax_lossscale as ls
        >>> state = ls.DynamicLossScale().init()
        >>> float(state.loss_scale), int(state.skipped_steps)
        (32768.0, 0)
        >>> state.memory
        ()
        >>> float(ls.HeadroomLossScale().init().memory.max_magnitude)
        0.0
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    memory: Any = ()

    @classmethod
    def create(
        cls,
        loss_scale: jax.typing.ArrayLike,
        hysteresis: jax.typing.ArrayLike = 1,
        memory: Any = (),
    ) -> "LossScaleState":
        """Return the state before the first step; what a rule's ``init`` returns.

        Args:
            loss_scale: the first scale.
            hysteresis: the first ``hysteresis_tracker``; -1 says that the rule never
                moves the scale, which may then be a constant of a compiled function.
            memory: what the rule remembers besides.

        Returns:
            A state with all other counters at 0 and ``grads_finite`` True.

        Examples:
            >>> import optax_lossscale as ls
            >>> ls.LossScaleState.create(128.0).loss_scale
            Array(128., dtype=float32)

            A rule that remembers more keeps it in ``memory``:

            >>> from typing import NamedTuple
            >>> import jax
            >>> import jax.numpy as jnp
            >>> class Longest(NamedTuple):
            ...     longest_run: jax.Array
            >>> state = ls.LossScaleState.create(128.0, memory=Longest(jnp.int32(0)))
            >>> state.memory
            Longest(longest_run=Array(0, dtype=int32))
        """
        return cls(
            loss_scale=jnp.asarray(loss_scale, jnp.float32),
            growth_tracker=jnp.zeros((), jnp.int32),
            hysteresis_tracker=jnp.asarray(hysteresis, jnp.int32),
            grads_finite=jnp.ones((), jnp.bool_),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            memory=memory,
        )

    def record(self, grads_finite: jax.typing.ArrayLike) -> "LossScaleState":
        """Return the state with the last step's fate written down.

        The bookkeeping that all rules share: call it first in a rule's ``update``.

        Args:
            grads_finite: one boolean; False for a step that is skipped.

        Returns:
            The state with ``grads_finite``, ``skipped_steps`` and
            ``consecutive_skips`` brought up to date.

        Raises:
            ValueError: if ``grads_finite`` is not one boolean.

        Examples:
            >>> import optax_lossscale as ls
            >>> state = ls.LossScaleState.create(128.0).record(False).record(False)
            >>> int(state.skipped_steps), int(state.consecutive_skips)
            (2, 2)
            >>> int(state.record(True).consecutive_skips)
            0
        """
        check_flag("grads_finite", grads_finite)
        return recorded(self, grads_finite)


def recorded(
    state: LossScaleState, grads_finite: jax.typing.ArrayLike
) -> LossScaleState:
    """Do as ``state.record`` does with a flag that has been checked."""
    grads_finite = jnp.asarray(grads_finite)
    skipped_steps = optax.safe_increment(state.skipped_steps)
    consecutive_skips = optax.safe_increment(state.consecutive_skips)
    return state._replace(
        grads_finite=grads_finite,
        skipped_steps=jnp.where(grads_finite, state.skipped_steps, skipped_steps),
        consecutive_skips=jnp.where(grads_finite, 0, consecutive_skips),
    )


def canonical(state: LossScaleState) -> LossScaleState:
    """Return a state whose fields have the types that rules keep, memory aside.

    ``optax.tree.set`` puts Python's numbers into a state, and a cast of the whole
    optimizer state puts float16 there, in which a scale of 2**16 is infinite.
    """
    dtypes = (jnp.float32, jnp.int32, jnp.int32, jnp.bool_, jnp.int32, jnp.int32)
    pairs = zip(state[:6], dtypes, strict=True)
    new_state = LossScaleState._make(
        [*(_as_type(x, dtype) for x, dtype in pairs), state.memory]
    )
    changed = any(new is not old for new, old in zip(new_state, state, strict=True))
    return new_state if changed else state


def check_single(state: LossScaleState) -> LossScaleState:
    """Return the canonical state of one run, or say why it is none."""
    for name, x in state._asdict().items():
        if name == "memory":
            continue
        number = isinstance(x, int | float) or hasattr(x, "dtype")
        if not number or isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`state` must hold numbers, got {describe(x)} for `{name}`. Pass what "
                "`init(params)` returns, or what was restored from a checkpoint."
            )
        if jnp.shape(x) != ():
            raise ValueError(
                f"`state` must hold the loss scale of one run, got {describe(x)} for "
                f"`{name}`. The state of an ensemble has one for each member: call "
                "this inside `jax.vmap`."
            )
    return canonical(state)


def _as_type(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if getattr(x, "dtype", None) == dtype and not getattr(x, "weak_type", False):
        return x
    if dtype == jnp.int32 and jnp.issubdtype(jnp.result_type(x), jnp.floating):
        # What NaN and infinity become as integers is not defined.
        x = jnp.clip(jnp.nan_to_num(jnp.asarray(x, jnp.float32)), -1, 2.0**30)
    return jnp.asarray(x, dtype)
