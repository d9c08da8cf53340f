"""Randomly generated optimizers, wrapped and compared with themselves.

`.ci/run random` tries hundreds, once a week.
"""

import dataclasses
import itertools
import os
import random
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits, noted
from shared import slow_but
from training import normal

import optax_lossscale as ls
from optax_lossscale._transform import mask

SHAPES = {"b": (4,), "w": (3, 4)}
MODES = [*itertools.product(["scan", "vmap", "jvp"], [False, True])]
# Skipped steps: the first ones, later ones, two in a row.
PATTERNS = ["xx..x.", "x...xx", "..xx.x"]


def symmetric(x):
    """Return a positive definite matrix."""
    rows = jnp.reshape(x, (-1, 4))
    return rows.T @ rows / (1 + jnp.sum(rows * rows)) + jnp.eye(4)


def times(x, y):
    return jnp.reshape(jnp.reshape(x, (-1, 4)) @ y, x.shape)


def eigen_root(x):
    values, vectors = jnp.linalg.eigh(symmetric(x))
    return times(x, (vectors * jnp.sqrt(values)) @ vectors.T)


def rows_before(x):
    return jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros_like(x[0]), x)[1]


def root(x):
    """Return the square root by Newton's method, which never ends on a NaN or a 0."""

    def is_far(y):
        return ~jnp.all(jnp.abs(y * y / x - 1) < 1e-4)

    return jax.lax.while_loop(is_far, lambda y: (y + x / y) / 2, x + 1)


def doubled(x):
    """Double until the largest is 1, which never ends on zeros."""
    return jax.lax.while_loop(lambda y: ~(jnp.max(y) >= 1), lambda y: 2 * y, x)


def host_reciprocal(x):
    def on_host(x):
        if not (np.isfinite(x).all() and np.all(x)):
            raise ZeroDivisionError("the host must invert zero or NaN")
        return 1 / np.asarray(x)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(on_host, shape, x, vmap_method="sequential")


# Of each leaf.
UNARY = {
    "negate": jnp.negative,
    "squash": lambda x: x * x / (1 + x * x),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "center": lambda x: x - jnp.mean(x),
    # Here and below, not by a norm, which has no derivative at 0.
    "normalize": lambda x: x / jnp.sqrt(1 + jnp.sum(x * x)),
    "through bfloat16": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "replace NaN": jnp.nan_to_num,
    "mask by itself": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "set a row": lambda x: x.at[0].set(1.0),
    "add to a row": lambda x: x.at[1].add(x[0]),
    "inner jit": jax.jit(lambda x: x * x + x),
    "checkpoint": jax.checkpoint(lambda x: jnp.cos(x) * x),
    "custom derivative": jax.nn.relu,
    "scan": rows_before,
    "for": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + 0.1 * i, x),
    "solve": lambda x: times(x, jnp.linalg.inv(symmetric(x))),
    "eigenvalues": eigen_root,
}
BINARY = {
    "add": jnp.add,
    "multiply": lambda x, y: jnp.tanh(x) * y,
    "divide": lambda x, y: x / (1 + jnp.abs(y)),
    "average": lambda x, y: 0.9 * x + 0.1 * y,
    "project": lambda x, y: x - y * jnp.vdot(x, y) / (1 + jnp.vdot(y, y)),
    "set all": lambda x, y: x.at[:].set(y),
    "branch": lambda x, y: jax.lax.cond(
        jnp.sum(x) > jnp.sum(y) + 0.123, lambda: x, lambda: 0.5 * y
    ),
}
# Their results are 0.1 at least, if their operands are finite.
POSITIVE = {
    "sum of squares": lambda x, y: jnp.abs(x) + y * y / (1 + y * y) + 0.1,
    "softplus": lambda x, y: jax.nn.softplus(x) + jnp.abs(y) + 0.1,
    "set positive": lambda x, y: x.at[:].set(jnp.abs(y) + 0.1),
}
# They fail, or never end, if their operand is zero or NaN.
OF_POSITIVE = {
    "reciprocal": jnp.reciprocal,
    "logarithm": jnp.log,
    "Newton": root,
    "double until": doubled,
    "on the host": host_reciprocal,
}
# Of the count of the steps, and of each leaf.
COUNTED = {
    "divide by the count": lambda i, x: x / (i + 1),
    "noise": lambda i, x: x + 0.1 * jax.random.normal(jax.random.key(i), x.shape),
    "every other step": lambda i, x: jax.lax.switch(
        i % 2, [lambda x: x, jnp.negative], x
    ),
}
WRITES = {
    "write a row": lambda i, x, y: x.at[i % 3].set(y[0]),
    "write rows": lambda i, x, y: x.at[jnp.stack([i, i + 1]) % 3].set(y[:2]),
    "write a slice": lambda i, x, y: jax.lax.dynamic_update_index_in_dim(
        x, y[0], i % 3, 0
    ),
    "shift": lambda i, x, y: jnp.roll(x, 1, 0).at[0].set(y[0]),
}


def normalize_all(count, tree):
    return optax.tree.scale(1 / (1 + optax.tree.norm(tree, squared=True)), tree)


GLOBAL = {"normalize all": normalize_all}  # of whole trees


def leafwise(function):
    return lambda count, *trees: jax.tree.map(function, *trees)


def counted(function):
    return lambda count, *trees: jax.tree.map(lambda *x: function(count, *x), *trees)


OPERATIONS = {
    **{k: leafwise(f) for k, f in (UNARY | BINARY | POSITIVE | OF_POSITIVE).items()},
    **{k: counted(f) for k, f in (COUNTED | WRITES).items()},
    **GLOBAL,
}
# With how many operands, and how often.
KINDS = [(UNARY, 1, 3), (BINARY, 2, 3), (POSITIVE, 2, 2), (OF_POSITIVE, 1, 6)]
KINDS += [(COUNTED, 1, 1), (WRITES, 2, 2), (GLOBAL, 1, 1)]


@dataclasses.dataclass
class Program:
    """Operations by name, each on values by number, and which values are returned.

    The first values are the gradients, the parameters and the slots of the state. Slots
    may return one value twice, or one that was given. None stands for a constant.
    """

    operations: list[tuple[str, list[int]]]
    slots: list[int | None]
    updates: int

    @classmethod
    def draw(cls, seed):
        rng = random.Random(seed)
        number = rng.randint(1, 3)
        values, positive, ends, operations = [*range(2 + number)], [], [], []
        for _ in range(rng.randint(3, 12)):
            kinds = [x for x in KINDS if positive or x[0] is not OF_POSITIVE]
            [(kind, arity, _)] = rng.choices(kinds, [often for *_, often in kinds])
            # Also recent values, and slots, which are written where they are read.
            of = [0, 0, *values, *values[-3:]]
            of = positive[-2:] if kind is OF_POSITIVE else of
            operations.append((rng.choice([*kind]), rng.choices(of, k=arity)))
            values.append(len(values))
            positive += [values[-1]] if kind is POSITIVE else []
            ends += [values[-1]] * (3 if kind is OF_POSITIVE else 1)
        ends += values[-4:]
        slots = [rng.choice([*ends, *ends, *values, None]) for _ in range(number)]
        return cls(operations, slots, rng.choice([*ends, 0]))

    def init(self, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), [zeros] * len(self.slots)

    def update(self, grads, state, params):
        (count, slots), ones = state, jax.tree.map(jnp.ones_like, params)
        values = [grads, params, *slots]
        for name, operands in self.operations:
            values.append(OPERATIONS[name](count, *(values[i] for i in operands)))
        slots = [ones if i is None else values[i] for i in self.slots]
        return values[self.updates], (count + 1, slots)


def gradients(seed, pattern):
    """Return gradients of each step, with one bad element in each skipped step."""
    rng = random.Random(f"{seed}{pattern}")
    grads = {k: normal(len(pattern), *x, seed=seed) for k, x in SHAPES.items()}
    for step, kind in enumerate(pattern):
        if kind == "x":
            bad = grads[rng.choice([*SHAPES])][step]
            bad.flat[rng.randrange(bad.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return grads


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def run_of(tx, params, mode):
    """Of a series of gradients, the updates and the state of each step."""

    def step(state, grads):
        updates, state = tx.update(grads, state, params)
        return state, (updates, state)

    def scanned(series):
        return jax.lax.scan(step, tx.init(params), series)[1]

    def beside_its_reverse(series):
        both = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), series)
        return at(jax.vmap(scanned)(both), 0)

    return jax.jit(beside_its_reverse if mode == "vmap" else scanned)


def derivative(tx, params):
    """Of the parameters after a series of steps, by a factor of its gradients."""

    def last(factor, series):
        def step(carry, grads):
            params, state = carry
            grads = optax.tree.scale(factor, grads)
            updates, state = tx.update(grads, state, params)
            updates = optax.tree.scale(0.1, updates)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), series)[0][0]

    return jax.jit(lambda g: jax.jvp(lambda x: last(x, g), (1.0,), (1.0,)))


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=2e-3, atol=2e-4)


def check_steps(inner, tx, params, seed, check_updates, mode):
    """Good steps are the inner optimizer's, and bad ones change nothing."""
    unwrapped, run = jax.jit(inner.update), run_of(tx, params, mode)
    for pattern in PATTERNS:
        series, old = gradients(seed, pattern), tx.init(params)
        results = jax.device_get(run(series))
        for t, kind in enumerate(pattern):
            (updates, state), applied = at(results, t), kind == "."
            if applied:  # else it may not end
                expected = unwrapped(at(series, t), old.inner_state, params)
                applied = not check_updates or bool(ls.all_finite(expected))
            assert state.scale_state.applied == applied, f"step {t} of {pattern}"
            if applied:
                assert_close((updates, state.inner_state), expected)
            else:
                assert_same_bits(state.inner_state, old.inner_state)
                assert_no_update(updates)
            old = state


def check_derivatives(inner, tx, params, seed, check_updates):
    """They are those without the skipped steps."""
    of_inner, of_wrapped = derivative(inner, params), derivative(tx, params)
    for pattern in PATTERNS:
        series, good = gradients(seed, pattern), [kind == "." for kind in pattern]
        expected = of_inner(at(series, good))
        if not check_updates or ls.all_finite(expected):
            assert_close(of_wrapped(series), expected)


@pytest.fixture
def deadline():
    """An update that never ends ends its process, and pytest-xdist names the seed."""
    signal.alarm(600)
    yield
    signal.alarm(0)


NUMBER = int(os.environ.get("RANDOM_OPTIMIZERS", 50))
# "Masked late", nothing is masked in place. Seed 18 would never end if masks stood
# inside of its loops.
CASES = itertools.product(["masked early", "masked late"], range(NUMBER))
QUICK = [("masked early", seed) for seed in range(18, 22)]


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids=lambda x: f"{x[0]}-{x[1]}")
def test_random_optimizer_is_itself_and_skips_without_trace(case, monkeypatch):
    masked, seed = case
    if masked == "masked late":
        monkeypatch.setattr(mask, "_in_place_or", lambda at_end, *_: at_end)
    program, (mode, check_updates) = Program.draw(seed), MODES[seed % len(MODES)]
    if mode == "jvp" and "on the host" in dict(program.operations):
        pytest.skip("a function on the host has no derivative")
    inner = optax.GradientTransformation(program.init, program.update)
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    params = {k: jnp.asarray(normal(*x, seed=seed + 1)) for k, x in SHAPES.items()}
    with noted(f"in {mode}, {check_updates = }", program):
        if mode == "jvp":
            check_derivatives(inner, tx, params, seed, check_updates)
        else:
            check_steps(inner, tx, params, seed, check_updates, mode)
