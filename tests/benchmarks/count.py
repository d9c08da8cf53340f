"""Compile the steps of all recipes for absent devices, and compare each with plain."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import hlo
import jax
from measure import Init, Step, build


@dataclasses.dataclass(frozen=True)
class Result:
    """What one recipe's program does; ratios and differences are to the plain step."""

    recipe: str
    bytes_moved: int
    bytes_ratio: float
    extra_bytes_per_parameter: float
    kernels: int
    kernels_ratio: float
    estimated_cycles: int
    cycles_ratio: float | None  # where the compiler estimates them
    collectives: dict[str, int]
    collective_bytes: int
    asynchronous_collectives: int
    temporary_bytes: int  # beyond arguments and results
    aliased_bytes: int  # of arguments, overwritten by results
    copied_bytes: int
    trace_seconds: float  # tracing and lowering
    compile_seconds: float
    trace_and_compile_ratio: float


def count(
    steps: Mapping[str, tuple[Init, Step]],
    params: Any,
    batch: Any,
    replicated: jax.sharding.Sharding,
    platform: str,
) -> list[Result]:
    """Count each step, donating its parameters and state; the first one is plain.

    ``params`` and ``batch`` are shapes with shardings. What else a state holds beside
    trees like the parameters is ``replicated``.
    """
    programs = {}
    for recipe, (init, step) in steps.items():
        own = place_state(jax.eval_shape(init, params), params, replicated)
        programs[recipe] = build(step, *own, batch, platforms=(platform,), repeats=1)
    leaves = jax.tree.leaves(params)
    # The program is that of one device.
    parameters = sum(math.prod(p.sharding.shard_shape(p.shape)) for p in leaves)
    counts = {recipe: hlo.count(p.as_text()) for recipe, (p, _) in programs.items()}
    plain = next(iter(steps))
    reference, plain_seconds = counts[plain], sum(programs[plain][1])
    results = []
    for recipe, (program, seconds) in programs.items():
        own, memory = counts[recipe], program.memory_analysis()
        extra_bytes = own.bytes_moved - reference.bytes_moved
        cycles_ratio = None
        if reference.estimated_cycles:
            cycles_ratio = own.estimated_cycles / reference.estimated_cycles
        results.append(
            Result(
                recipe=recipe,
                **dataclasses.asdict(own),
                bytes_ratio=own.bytes_moved / reference.bytes_moved,
                extra_bytes_per_parameter=extra_bytes / parameters,
                kernels_ratio=own.kernels / reference.kernels,
                cycles_ratio=cycles_ratio,
                temporary_bytes=memory.temp_size_in_bytes,
                aliased_bytes=memory.alias_size_in_bytes,
                trace_seconds=seconds[0],
                compile_seconds=seconds[1],
                trace_and_compile_ratio=sum(seconds) / plain_seconds,
            )
        )
    return results


def place(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )


def place_state(state: Any, params: Any, replicated: jax.sharding.Sharding) -> Any:
    """Give each tree in the state that is like the parameters their shardings."""
    structure = jax.tree.structure(params)

    def like_params(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure

    def place_tree(tree: Any) -> Any:
        if not like_params(tree):
            return place(tree, replicated)
        return jax.tree.map(lambda x, p: place(x, p.sharding), tree, params)

    return jax.tree.map(place_tree, state, is_leaf=like_params)
