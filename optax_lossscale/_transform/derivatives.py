"""Give a function the derivatives of another one that has the same values."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

Leaves = Sequence[Any]


def call_with_derivatives_of(
    derived: Callable[..., Leaves], function: Callable[..., Leaves], *args: Any
) -> Leaves:
    """Call a function with the derivatives of another that has the same values.

    Neither function may close over tracers.
    """
    leaves, structure = jax.tree.flatten(args)

    @jax.custom_jvp
    def primal(*leaves: Any) -> Leaves:
        return function(*jax.tree.unflatten(structure, leaves))

    @functools.partial(primal.defjvp, symbolic_zeros=True)
    def _(primals: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
        moves = [not isinstance(t, SymbolicZero) for t in tangents]

        def along(moving: Leaves) -> Leaves:
            rest = iter(moving)
            pairs = zip(primals, moves, strict=True)
            leaves = [next(rest) if moved else x for x, moved in pairs]
            return derived(*jax.tree.unflatten(structure, leaves))

        moving, directions = (
            list(itertools.compress(x, moves)) for x in (primals, tangents)
        )
        return jax.jvp(along, (moving,), (directions,))

    return primal(*leaves)
