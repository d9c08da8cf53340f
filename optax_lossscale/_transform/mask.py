"""Apply or skip an update: select the new state or the old one, by ``jnp.where``.

The update runs in every step, so that every device reaches a collective inside it. In a
skipped step it gets finite placeholders, and its results are discarded. With NaN, a
line search might not end, and derivatives would be NaN in spite of ``jnp.where``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import dtype_of, is_inexact
from .._jax_internals import is_ref, is_staging, without_constants
from .._programs.derivatives import call_with_derivatives_of
from .._programs.traced_call import evaluate_with_nan
from .._tree import choose, select
from .._validation import is_traced
from .in_place import update_in_place
from .nan_tolerant import has_loop, tolerates_nan

# Takes whether the step is finite, and the floating-point gradients. Returns whether
# the results are usable, the updates, and the new state.
Run = Callable[[jax.Array, list[jax.Array]], Any]


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
    inexact = [x for x in jax.tree.leaves(grads) if is_inexact(x)]

    def run(finite: jax.Array, inexact: list[jax.Array]) -> Any:
        numbers = iter(_finite_grads(finite, inexact))
        new_grads = jax.tree.map(lambda x: next(numbers) if is_inexact(x) else x, grads)
        return update(new_grads, _finite_extra_args(finite, extra_args, grads, staging))

    outputs = None
    # `grad_fn` is expensive, and a checked update is evaluated twice in place.
    if (
        staging
        and isinstance(finite, jax.core.Tracer)
        and extra_args.get("grad_fn") is None
    ):
        outputs = _in_place_if_possible(run, finite, inexact, old_state, is_checked)
    if outputs is None:
        # Only eager derivatives need a second run. Compiled, it costs too much.
        again = is_checked and not staging and is_traced((inexact, old_state))
        outputs = _masked(run, finite, inexact, old_state, again)
    applied, updates, new_state = outputs
    # Like the updates, not the gradients: the optimizer may return another tree.
    no_updates = jax.tree.map(_zeros_like, updates)
    return applied, select(applied, updates, no_updates), new_state


def _masked(
    run: Run, finite: jax.Array, inexact: list[jax.Array], old_state: Any, again: bool
) -> Any:
    """Run an update, and return whether it is applied, its updates, and the state."""
    usable, updates, new_state = run(finite, inexact)
    applied = finite & usable
    if again:
        # If finite gradients lead to NaN, derivatives of this run are NaN. Those of a
        # second one are not: it gets placeholders unless the step is applied.
        _, updates, new_state = run(applied, inexact)
    return applied, updates, select(applied, new_state, old_state)


def _in_place_if_possible(
    run: Run, finite: jax.Array, inexact: list[jax.Array], old_state: Any, checked: bool
) -> Any:
    """Return what ``_masked`` does, or None if the program does not tolerate NaN."""
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(finite, inexact)
    program, structure = without_constants(traced), jax.tree.structure(shapes)
    # A checked update is evaluated twice in place, for which a loop is too expensive.
    if not tolerates_nan(program) or checked and has_loop(program):
        return None

    def masked(finite: Any, inexact: Any, consts: Any, old_state: Any) -> Any:
        def run(*inputs: Any) -> Any:
            outputs = evaluate_with_nan(program, *jax.tree.leaves(inputs), *consts)
            return jax.tree.unflatten(structure, outputs)

        outputs = _masked(run, finite, inexact, old_state, again=checked)
        return jax.tree.leaves(outputs)

    in_place = functools.partial(update_in_place, program, checked)
    inputs = finite, inexact, traced.consts, old_state
    leaves = call_with_derivatives_of(masked, in_place, *inputs)
    return jax.tree.unflatten(structure, leaves)


# Compiled: one equation of the update's program instead of several per gradient.
@jax.jit
def _finite_grads(finite: jax.Array, grads: list[jax.Array]) -> list[jax.Array]:
    return [choose(finite, x, _placeholder(x)) for x in grads]


def _finite_extra_args(
    finite: jax.Array, extra_args: dict[str, Any], grads: Any, staging: bool
) -> dict[str, Any]:
    known = set(map(id, jax.tree.leaves(grads)))
    # While a step is compiled, an array that is no tracer must stay one: Python code in
    # the optimizer may read it.
    kind = jax.core.Tracer if staging else jax.Array

    def leaf(path: Any, x: Any) -> Any:
        if not is_inexact(x):
            return x
        if id(x) in known:  # a line search takes the gradients as `grad`, too
            return choose(finite, x, _placeholder(x))
        if not isinstance(x, kind) or is_ref(x):
            return x
        if path[0].key == "value":
            # With this old loss, a line search ends: every new loss is below it.
            return choose(finite, x, jnp.full_like(x, _largest(x) / 4))
        return choose(finite | jnp.isfinite(x), x, _placeholder(x))

    new: dict[str, Any] = jax.tree_util.tree_map_with_path(leaf, extra_args)
    return new


def _largest(x: Any) -> float:
    return float(jnp.finfo(dtype_of(x)).max)


def _placeholder(x: jax.Array) -> jax.Array:
    """Return nonzero numbers whose deviations from their mean are nonzero, too.

    The derivatives of a norm and of a square root are not finite at 0. The squares of
    these numbers, and a thousandth of the squares, are nonzero in float16 as well.
    """
    shape = jnp.shape(x)
    index = sum(
        jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
    )
    # 1, 2 and 5 times 1/64. Adding them to zeros makes them sharded as ``x`` is.
    steps = 1 + (index % 3) ** 2
    return jnp.zeros_like(x) + (jnp.asarray(steps) / 64).astype(dtype_of(x))


def _zeros_like(x: Any) -> Any:
    """Return zeros that change no bit of a number when they are added to it."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        # Adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # float0 and PRNG keys have no zero, and nothing is added to them.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x
