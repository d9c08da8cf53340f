"""Apply or skip an update: select the new state or the old one, by ``jnp.where``.

The update runs in every step, so that every device reaches a collective inside it. In a
skipped step it gets finite placeholders, and its results are discarded. With NaN, a
line search might not end, and derivatives would be NaN in spite of ``jnp.where``
(https://github.com/jax-ml/jax/issues/1052).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import Leaf, dtype_of, is_inexact
from .._jax_internals import is_ref, is_staging, unknown_jax
from .._tree import is_array, select, where
from .._validation import is_traced, warn

# A profile of a step shows the wrapped optimizer by this name.
UPDATE_SCOPE = "optax_lossscale_update"


class _Arrays(NamedTuple):
    """The floating-point arrays that an update gets, and a skipped step replaces."""

    grads: list[jax.Array]
    value: list[jax.Array]  # the loss, given as the extra argument ``value``
    others: list[jax.Array]  # the arrays in other extra arguments


# Runs an update, and masks its results. It takes whether the gradients and the loss are
# finite, the arrays and the old state. It returns whether the step is applied, its
# updates, and the state after it.
_Masked = Callable[[jax.Array, _Arrays, optax.OptState], tuple[jax.Array, Any, Any]]


def masked_update(
    update: Callable[[optax.Updates, dict[str, Any]], Any],
    finite: jax.Array,
    grads: optax.Updates,
    extra_args: dict[str, Any],
    old_state: optax.OptState,
    *,
    is_checked: bool,
) -> tuple[jax.Array, optax.Updates, optax.OptState]:
    """Return whether a step is applied, its updates, and the state after it.

    A step is applied if it is ``finite`` and its results are usable. If it is skipped,
    the updates are zero and the state is the old one.

    ``update`` takes the gradients and the extra arguments. It returns whether its
    results are usable (True unless ``is_checked``), the updates and the new state.
    """
    staging = is_staging()
    arrays, arguments_with = _arrays_of(grads, extra_args, staging)

    def update_with(arrays: _Arrays) -> Any:
        with jax.named_scope(UPDATE_SCOPE):
            return update(*arguments_with(arrays))

    # Eager derivatives need a second run. Compiled, it would double the cost.
    runs_twice = is_checked and not staging and is_traced((arrays, old_state))
    masked: _Masked = functools.partial(_select_at_end, runs_twice, update_with)
    # With a `grad_fn` the update is checked. In place it would run twice, and the
    # derivative that it takes is expensive.
    if staging and extra_args.get("grad_fn") is None:
        masked = _in_place_or(masked, update_with, is_checked)
    applied, updates, new_state = masked(finite, arrays, old_state)
    # Like the updates, not the gradients: the optimizer may return another tree.
    no_updates = jax.tree.map(_zeros_like, updates)
    return applied, select(applied, updates, no_updates), new_state


def _in_place_or(at_end: _Masked, update: Any, is_checked: bool) -> _Masked:
    """Return a function that masks in place, or else at the end."""

    def masked(finite: jax.Array, arrays: _Arrays, old_state: optax.OptState) -> Any:
        given = finite, arrays, old_state
        # A program returns arrays alone, but the state may hold functions of a model.
        if not all(map(is_array, jax.tree.leaves(old_state))):
            return at_end(*given)
        # Outside of the `try`: errors of the user's optimizer are the user's.
        traced, shapes = jax.make_jaxpr(update, return_shape=True)(arrays)
        try:
            from .in_place import mask_in_place

            # In place, a skipped step runs on NaN, so derivatives come from here.
            derived = functools.partial(_select_at_end, is_checked)
            outputs = mask_in_place(traced, shapes, derived, is_checked, *given)
        except Exception as error:
            # First: an error of the user's own derivative is raised here, too.
            outputs = at_end(*given)
            warn(
                "The updates take more time and memory on a CPU, with the same "
                f"results. {unknown_jax(error)}",
                "reference/versions.md#if-a-new-jax-changes-its-internals",
            )
        return at_end(*given) if outputs is None else outputs

    return masked


def _select_at_end(
    runs_twice: bool, update: Any, finite: Any, arrays: _Arrays, old_state: Any
) -> tuple[jax.Array, Any, Any]:
    usable, updates, new_state = update(_with_placeholders(finite, arrays))
    applied = finite & usable
    if runs_twice:
        # If finite gradients lead to NaN, derivatives of this run are NaN. A second run
        # has none: it gets placeholders unless the step is applied.
        _, updates, new_state = update(_with_placeholders(applied, arrays))
    return applied, updates, select(applied, new_state, old_state)


def _arrays_of(
    grads: optax.Updates, extra_args: dict[str, Any], staging: bool
) -> tuple[_Arrays, Callable[[_Arrays], tuple[Any, dict[str, Any]]]]:
    """Return the arrays among the arguments, and a function that replaces them.

    A line search also takes the gradients as the extra argument ``grad``: the same
    array is replaced in both places.
    """
    # While a step is compiled, Python code in the optimizer may read an array that is
    # no tracer, so it is not replaced.
    kind = jax.core.Tracer if staging else jax.Array
    taken: dict[int, Any] = {}

    def take(tree: Any, kind: Any) -> list[Any]:
        """Return the arrays of a tree that are in none of the trees before."""
        new = {
            id(x): x
            for x in jax.tree.leaves(tree)
            if id(x) not in taken and is_inexact(x)
            if isinstance(x, kind) and not is_ref(x)
        }
        taken.update(new)
        return [*new.values()]

    value = extra_args.get("value")
    found = _Arrays(take(grads, object), take(value, kind), take(extra_args, kind))
    leaves, structure = jax.tree.flatten((grads, extra_args))

    def arguments_with(arrays: _Arrays) -> Any:
        new = dict(zip(taken, jax.tree.leaves(arrays), strict=True))
        return jax.tree.unflatten(structure, [new.get(id(x), x) for x in leaves])

    return found, arguments_with


def _with_placeholders(finite: jax.Array, arrays: _Arrays) -> _Arrays:
    """Replace the arrays by finite values unless the step is finite."""
    grads = _finite_grads(finite, arrays.grads)
    # The old loss becomes a quarter of the largest value, so that any new loss is an
    # improvement, and a line search stops.
    value = [where(finite, x, jnp.full_like(x, _largest(x) / 4)) for x in arrays.value]
    others = [
        where(finite | jnp.isfinite(x), x, _placeholder(x)) for x in arrays.others
    ]
    return _Arrays(grads, value, others)


# Compiled: one equation instead of several per gradient.
@jax.jit
def _finite_grads(finite: jax.Array, grads: list[jax.Array]) -> list[jax.Array]:
    return [where(finite, x, _placeholder(x)) for x in grads]


def _largest(x: Leaf) -> float:
    return float(jnp.finfo(dtype_of(x)).max)


def _placeholder(x: jax.Array) -> jax.Array:
    """Return values that are nonzero and differ from their mean.

    The derivatives of a norm and of a square root are not finite at 0. The squares of
    these values, and a thousandth of the squares, are also nonzero in float16.
    """
    shape = jnp.shape(x)
    index = sum(
        jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
    )
    # 1, 2 and 5 times 1/64. Adding them to zeros makes them sharded as ``x`` is.
    steps = 1 + (index % 3) ** 2
    return jnp.zeros_like(x) + (jnp.asarray(steps) / 64).astype(dtype_of(x))


def _zeros_like(x: Leaf) -> Leaf:
    """Return zeros that change no bit of a number when they are added to it."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        # Adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # float0 and PRNG keys have no zero, and nothing is added to them.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x
