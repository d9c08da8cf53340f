"""Optimizers that no one wrote: random programs, wrapped and compared with themselves.

``python tests/helpers/random_optimizers.py [--number 400] [--first 0] [--late]`` prints
the seeds whose wrapped optimizer is wrong, and its program. ``--late`` runs them with
the mask that is always right. A seed that takes longer than a minute hangs: the command
ends, and the last line names it.
"""

import argparse
import dataclasses
import faulthandler
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from asserts import assert_same_bits, without_keys

import optax_lossscale as ls
from optax_lossscale._transform import mask

SHAPES = {"b": (4,), "w": (3, 4)}
ROWS = 3
TRANSFORMS = ["jit", "scan", "vmap", "jvp"]
MODES = [*itertools.product(TRANSFORMS, [False, True]), ("eager", False)]
# Skipped steps: the first ones, later ones, two in a row.
PATTERNS = ["xx..x.", "x...xx", "..xx.x"]
BAD = [np.nan, np.inf, -np.inf]


def assert_close(actual: Any, expected: Any) -> None:
    trees = without_keys(actual), without_keys(expected)
    chex.assert_trees_all_close(*trees, rtol=2e-3, atol=2e-4)


class State(NamedTuple):
    count: Any
    key: Any
    slots: list[Any]
    history: Any


@dataclasses.dataclass
class Context:
    """What an operation may read and change beside its operands."""

    count: jax.Array
    key: jax.Array
    history: Any

    def noise(self, x: Any) -> Any:
        self.key, key = jax.random.split(self.key)
        return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), x)

    def remember(self, write: Callable[[Any, Any, Any], Any], x: Any) -> Any:
        i = self.count % ROWS
        self.history = jax.tree.map(lambda h, x: write(h, i, x), self.history, x)
        return jax.tree.map(lambda h: jnp.mean(h, 0), self.history)


def matrix(x: jax.Array) -> jax.Array:
    """Return a symmetric, positive definite matrix."""
    rows = jnp.reshape(x, (-1, 4))
    return rows.T @ rows / (1 + jnp.sum(rows * rows)) + jnp.eye(4)


def times(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.reshape(jnp.reshape(x, (-1, 4)) @ y, x.shape)


def root(x: jax.Array) -> jax.Array:
    """Return the square root by Newton's method, which never ends on a NaN or a 0."""

    def far(y: jax.Array) -> jax.Array:
        return ~jnp.all(jnp.abs(y * y / x - 1) < 1e-4)

    return jax.lax.while_loop(far, lambda y: (y + x / y) / 2, x + 1)


def doubled(x: jax.Array) -> jax.Array:
    """Double until the largest is 1: this never ends on zeros."""
    loop = jax.lax.while_loop
    return loop(lambda y: ~(jnp.max(y) >= 1), lambda y: 2 * y, x)


def on_host(function: Callable[[Any], Any]) -> Callable[[jax.Array], jax.Array]:
    def call(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(function, shape, x, vmap_method="sequential")

    return call


def host_reciprocal(x: Any) -> Any:
    x = np.asarray(x)
    if not (np.isfinite(x).all() and x.all()):
        raise ZeroDivisionError("the host must invert zero or NaN")
    return 1 / x


def eigen_root(x: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(matrix(x))
    return times(x, (vectors * jnp.sqrt(values)) @ vectors.T)


def lines(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros_like(x[0]), x)[1]


# Elementwise, or with the shape of the operand.
UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "negate": jnp.negative,
    "half": lambda x: 0.5 * x,
    "squash": lambda x: x * x / (1 + x * x),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "center": lambda x: x - jnp.mean(x),
    # A norm has no derivative at 0.
    "normalize": lambda x: x / jnp.sqrt(1 + jnp.sum(x * x)),
    "through bfloat16": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "replace NaN": jnp.nan_to_num,
    "mask by itself": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "set a row": lambda x: x.at[0].set(1.0),
    "add to a row": lambda x: x.at[1].add(x[0]),
    "slice": lambda x: jax.lax.dynamic_update_slice(
        x, x[:1], (1,) + (0,) * (x.ndim - 1)
    ),
    "inner jit": jax.jit(lambda x: x * x + x),
    "checkpoint": jax.checkpoint(lambda x: jnp.cos(x) * x),
    "custom derivative": jax.nn.relu,
    "scan": lines,
    "for": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + 0.1 * i, x),
    "solve": lambda x: times(x, jnp.linalg.inv(matrix(x))),
    "eigenvalues": eigen_root,
}
BINARY: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": lambda x, y: jnp.tanh(x) * y,
    "divide": lambda x, y: x / (1 + jnp.abs(y)),
    "average": lambda x, y: 0.9 * x + 0.1 * y,
    "project": lambda x, y: x - y * jnp.vdot(x, y) / (1 + jnp.vdot(y, y)),
    "set all": lambda x, y: x.at[:].set(y),
    "set one row": lambda x, y: x.at[1].set(y[0]),
    "branch": lambda x, y: jax.lax.cond(
        jnp.sum(x) > jnp.sum(y) + 0.123, lambda: x, lambda: 0.5 * y
    ),
}
# Their results are 0.1 at least, if their operands are finite.
POSITIVE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum of squares": lambda x, y: jnp.abs(x) + y * y / (1 + y * y) + 0.1,
    "softplus": lambda x, y: jax.nn.softplus(x) + jnp.abs(y) + 0.1,
    "set positive": lambda x, y: x.at[:].set(jnp.abs(y) + 0.1),
}
# They fail, or never end, if their operand is zero or NaN.
OF_POSITIVE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "reciprocal": jnp.reciprocal,
    "logarithm": jnp.log,
    "Newton": root,
    "double until": doubled,
    "on the host": on_host(host_reciprocal),
}
WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "write a row": lambda h, i, x: h.at[i].set(x),
    "write rows": lambda h, i, x: h.at[jnp.stack([i, (i + 1) % ROWS])].set(x),
    "shift": lambda h, i, x: jnp.roll(h, 1, 0).at[0].set(x),
    "write a slice": lambda h, i, x: jax.lax.dynamic_update_index_in_dim(h, x, i, 0),
}


def global_norm(context: Context, x: Any) -> Any:
    norm = optax.tree.norm(x)
    return jax.tree.map(lambda x: x / jnp.maximum(norm, 1), x)


def every_other(context: Context, x: Any) -> Any:
    branches = [lambda x: x, lambda x: jax.tree.map(jnp.negative, x)]
    return jax.lax.switch(context.count % 2, branches, x)


OF_TREES: dict[str, Callable[[Context, Any], Any]] = {
    "global norm": global_norm,
    "every other step": every_other,
    "noise": Context.noise,
    "by the count": lambda c, x: optax.tree.scale(1 / (c.count + 1), x),
    **{
        name: lambda c, x, write=write: c.remember(write, x)
        for name, write in WRITES.items()
    },
}


@dataclasses.dataclass
class Program:
    """Operations by name, each on values by number, and which values are returned.

    The first values are the gradients, the parameters and the slots of the state. Slots
    may return one value twice, or one that was given. None stands for a constant.
    """

    operations: list[tuple[str, list[int]]]
    slots: list[int | None]
    updates: int

    def init(self, params: Any) -> State:
        zeros = jax.tree.map(jnp.zeros_like, params)
        history = jax.tree.map(lambda x: jnp.zeros((ROWS, *x.shape)), params)
        slots = [zeros] * len(self.slots)
        return State(jnp.zeros((), jnp.int32), jax.random.key(0), slots, history)

    def update(self, grads: Any, state: State, params: Any) -> tuple[Any, State]:
        context = Context(state.count, state.key, state.history)
        values = [grads, params, *state.slots]
        for name, operands in self.operations:
            given = [values[i] for i in operands]
            if name in OF_TREES:
                values.append(OF_TREES[name](context, *given))
                continue
            function = (UNARY | BINARY | POSITIVE | OF_POSITIVE)[name]
            values.append(jax.tree.map(function, *given))
        ones = jax.tree.map(jnp.ones_like, params)
        slots = [ones if i is None else values[i] for i in self.slots]
        count = optax.safe_increment(context.count)
        return values[self.updates], State(count, context.key, slots, context.history)


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    number = rng.randint(1, 3)
    values, positive = list(range(2 + number)), []
    operations: list[tuple[str, list[int]]] = []
    for _ in range(rng.randint(3, 12)):
        kinds = [(UNARY, 3, 1), (BINARY, 3, 2), (POSITIVE, 2, 2), (OF_TREES, 2, 1)]
        kinds += [(OF_POSITIVE, 3, 1)] if positive else []
        table, _, arity = rng.choices(kinds, [weight for _, weight, _ in kinds])[0]
        # Recent values, and slots, which are written where they are read.
        choices = positive[-2:] if table is OF_POSITIVE else [*values, *values[-3:]]
        operations.append(
            (rng.choice([*table]), [rng.choice(choices) for _ in range(arity)])
        )
        values.append(len(values))
        positive += [values[-1]] if table is POSITIVE else []
    ends = [*values, *values[-4:], *positive]
    slots = [rng.choice([*ends, *ends, None]) for _ in range(number)]
    return Program(operations, slots, rng.choice([*values[-4:], 0]))


def arrays(seed: int, number: int) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {name: (number, *shape) for name, shape in SHAPES.items()}
    return {k: rng.normal(size=x).astype(np.float32) for k, x in shapes.items()}


def gradients(seed: int, pattern: str) -> Any:
    """Return gradients of each step, of which one element is bad in a skipped one."""
    rng, grads = random.Random(f"{seed}{pattern}"), arrays(seed, len(pattern))
    for step, kind in enumerate(pattern):
        if kind == "x":
            bad = grads[rng.choice([*SHAPES])][step]
            bad.flat[rng.randrange(bad.size)] = rng.choice(BAD)
    return grads


def at(tree: Any, *index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


@functools.partial(jax.jit, static_argnums=(1, 2))
def split(tree: Any, number: int, *numbers: int) -> list[Any]:
    """Return a list of trees, or lists of lists, from the first axes of a tree."""
    trees = [at(tree, i) for i in range(number)]
    return [split(x, *numbers) for x in trees] if numbers else trees


def run(tx: Any, params: Any, grads: list[Any], mode: str) -> Iterator[Any]:
    """Yield the updates and the states of all steps, for each series of gradients."""

    def step(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return state, (updates, state)

    state, steps = tx.init(params), len(PATTERNS[0])
    if mode == "vmap":
        stacked = jax.tree.map(lambda *x: np.stack(x), *grads)
        results = jax.jit(jax.vmap(lambda g: jax.lax.scan(step, state, g)[1]))(stacked)
        yield from split(results, len(grads), steps)
        return
    jitted = step if mode == "eager" else jax.jit(step)
    scanned = jax.jit(lambda g: jax.lax.scan(step, state, g)[1])
    for series in grads:
        if mode == "scan":
            yield split(scanned(series), steps)
            continue
        now, results = state, []
        for t in range(steps):
            now, result = jitted(now, at(series, t))
            results.append(result)
        yield results


def derivatives(tx: Any, params: Any, grads: list[Any]) -> list[Any]:
    """Return the derivatives of the parameters after all steps by the gradients."""

    def last(x: Any, grads: Any) -> Any:
        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(optax.tree.scale(x, grads), state, params)
            params = jax.tree.map(lambda p, u: p + 0.1 * u, params, updates)
            return (params, state), None

        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]

    run = jax.jit(lambda g: jax.jvp(lambda x: last(x, g), (1.0,), (1.0,)))
    return [run(series) for series in grads]


def check(seed: int, mode: str, check_updates: bool) -> None:
    """Compare a wrapped random optimizer with itself."""
    program = random_program(seed)
    inner = optax.GradientTransformation(program.init, program.update)
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    params = jax.tree.map(jnp.asarray, at(arrays(seed + 1, 1), 0))
    unwrapped = jax.jit(program.update)
    # Eagerly each step compiles its loops anew.
    patterns = PATTERNS[:1] if mode == "eager" else PATTERNS
    grads = [gradients(seed, pattern) for pattern in patterns]
    if mode == "jvp":
        if all(name != "on the host" for name, _ in program.operations):
            applied = [
                jax.tree.map(lambda x, i=[c == "." for c in pattern]: x[i], series)
                for pattern, series in zip(patterns, grads, strict=True)
            ]
            expected = derivatives(inner, params, applied)
            if not check_updates or ls.all_finite(expected):
                assert_close(derivatives(tx, params, grads), expected)
        return
    runs = run(tx, params, grads, mode)
    for pattern, series, results in zip(patterns, grads, runs, strict=True):
        old = tx.init(params)
        for t, (updates, state) in enumerate(results):
            skipped = pattern[t] == "x"
            if not skipped:
                expected = unwrapped(at(series, t), old.inner_state, params)
                skipped = check_updates and not ls.all_finite(expected)
            assert state.scale_state.applied != skipped, f"step {t} of {pattern}"
            if skipped:
                assert_same_bits(state.inner_state, old.inner_state)
                assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))
            else:
                assert_close((updates, state.inner_state), expected)
            old = state


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--late", action="store_true", help="no masks are early")
    options = parser.parse_args(arguments)
    if options.late:
        mask.tolerates_nan = lambda *_: False
    wrong = 0
    for seed in range(options.first, options.first + options.number):
        mode, check_updates = MODES[seed % len(MODES)]
        name = f"seed {seed} in {mode}" + ", check_updates" * check_updates
        print(f"{name:40}", end="\r", flush=True)
        faulthandler.dump_traceback_later(600, exit=True, file=sys.stdout)
        try:
            check(seed, mode, check_updates)
        except Exception as error:
            wrong += 1
            print(f"{name}: {error!r}\n    {random_program(seed)}")
        faulthandler.cancel_dump_traceback_later()
    print(f"{wrong} wrong, of {options.number} random optimizers")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
