"""Compile the steps of all recipes, run them in turn, and compare each with plain."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Result:
    """What one recipe cost; ratios are to the plain step of the same round."""

    recipe: str
    milliseconds: float  # median
    ratio: float  # median
    ratio_quartiles: tuple[float, float]
    temporary_bytes: int  # beyond arguments and results, of the compiled program
    trace_seconds: float  # tracing and lowering
    compile_seconds: float
    trace_and_compile_ratio: float


Init = Callable[[Any], tuple[Any, Any]]
Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def measure(
    steps: Mapping[str, tuple[Init, Step]],
    params: Any,
    batch: Any,
    repeats: int,
    builds: int = 3,
) -> list[Result]:
    """Measure each step, donating its parameters and state; the first one is plain."""
    programs, arguments, built = {}, {}, {}
    for recipe, (init, step) in steps.items():
        own = jax.tree.map(lambda x: x.copy(), params)
        arguments[recipe] = init(own)
        programs[recipe], built[recipe] = build(
            step, *arguments[recipe], batch, repeats=builds
        )
    rounds = []
    rng = np.random.default_rng(0)
    for _ in range(repeats + 1):
        seconds = {}
        # In turn, so that whatever slows the machine down slows all of them down; in
        # another order each time, since a step that frees much memory slows the next.
        for recipe in rng.permutation(list(programs)):
            start = time.perf_counter()
            *arguments[recipe], _ = jax.block_until_ready(
                programs[recipe](*arguments[recipe], batch)
            )
            seconds[recipe] = time.perf_counter() - start
        rounds.append([seconds[recipe] for recipe in programs])
    times = np.array(rounds[1:]).T  # the first round warms up
    ratios = times / times[0]
    reference = sum(built[next(iter(steps))])
    return [
        Result(
            recipe=recipe,
            milliseconds=1e3 * float(np.median(times[i])),
            ratio=float(np.median(ratios[i])),
            ratio_quartiles=tuple(np.percentile(ratios[i], [25, 75]).tolist()),
            temporary_bytes=program.memory_analysis().temp_size_in_bytes,
            trace_seconds=built[recipe][0],
            compile_seconds=built[recipe][1],
            trace_and_compile_ratio=sum(built[recipe]) / reference,
        )
        for i, (recipe, program) in enumerate(programs.items())
    ]


def run_times(function: Callable[[Any], Any], argument: Any, repeats: int) -> list:
    """Return the seconds that each run took, after one to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(argument))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def build(
    step: Step,
    *args: Any,
    platforms: tuple[str, ...] | None = None,
    repeats: int = 3,
) -> tuple[jax.stages.Compiled, tuple[float, float]]:
    """Trace and compile; return the fastest times of the repeats, one if it is slow."""
    fastest = None
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        traceable = jax.jit(step, donate_argnums=(0, 1))
        lowered = traceable.trace(*args).lower(lowering_platforms=platforms)
        traced = time.perf_counter()
        program = lowered.compile()
        seconds = traced - start, time.perf_counter() - traced
        if fastest is None or sum(seconds) < sum(fastest):
            fastest = seconds
        if sum(seconds) > 10:
            break
    return program, fastest
