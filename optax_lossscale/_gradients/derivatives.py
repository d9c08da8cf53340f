"""Give a function the derivatives of another one that has the same values."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

Leaves = Sequence[Any]


def with_derivatives_of(
    derived: Callable[..., Leaves], function: Callable[..., Leaves]
) -> Callable[..., Leaves]:
    """Return a function with the derivatives of another that has the same values.

    Neither may close over tracers.
    """

    def both(*args: Any) -> Leaves:
        leaves, structure = jax.tree.flatten(args)
        # The old state is among the constants, too. One array is one argument.
        unique = {id(x): x for x in leaves}
        at = {key: i for i, key in enumerate(unique)}
        index = [at[id(x)] for x in leaves]

        def arguments(unique: Leaves) -> Any:
            return jax.tree.unflatten(structure, [unique[i] for i in index])

        @jax.custom_jvp
        def evaluate(*unique: Any) -> Leaves:
            return function(*arguments(unique))

        @functools.partial(evaluate.defjvp, symbolic_zeros=True)
        def _(primals: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
            moves = [not isinstance(t, SymbolicZero) for t in tangents]

            def along(moving: Leaves) -> Leaves:
                rest = iter(moving)
                leaves = [
                    next(rest) if moved else x
                    for x, moved in zip(primals, moves, strict=True)
                ]
                return derived(*arguments(leaves))

            moving, directions = (
                list(itertools.compress(x, moves)) for x in (primals, tangents)
            )
            return jax.jvp(along, (moving,), (directions,))

        return evaluate(*unique.values())

    return both
