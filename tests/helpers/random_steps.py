"""Train steps put together by chance: optimizer, rule, gradients, place, tree, event.

`random_optimizers` makes up optimizers; these are Optax's.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import vary
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from simulated_rules import Simulated

import optax_lossscale as ls

ROWS = 4
MESH = make_mesh(d=ROWS)
PLACES = ["eager", "jit", "donation", "scan", "vmap", "shard_map", "mesh"]
WAYS = ["value_and_grad", "grad", "by hand", "scale_backward", "retries"]
GIVEN = [(), ("value",), ("grads_finite",), ("value", "grads_finite")]
EVENTS = ["pickle", "rule", "scale"]
TREES: dict[str, Callable[[Any], Any]] = {
    "dict": lambda leaf: {"w": leaf(ROWS, 3), "b": leaf(3)},
    "nested": lambda leaf: [leaf(), (leaf(8, 2), None)],
    "array": lambda leaf: leaf(ROWS),
    "bfloat16": lambda leaf: (leaf(2, 2).astype(jnp.bfloat16), {"b": leaf(2)}),
}
RATE, CLIP = optax.linear_schedule(1e-3, 5e-4, 5), optax.clip_by_global_norm(1.0)
OPTIMIZERS = {
    "sgd": optax.sgd(RATE),
    "momentum": optax.sgd(RATE, momentum=0.9),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(RATE),
    "lion": optax.lion(RATE),
    "rmsprop": optax.rmsprop(RATE),
    "lamb": optax.lamb(RATE),
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=2),
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda tx: optax.chain(CLIP, tx, optax.ema(0.9)),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(
        tx, lambda p: jax.tree.map(lambda x: x.ndim > 0, p)
    ),
    "partition": lambda tx: optax.partition(
        {0: tx, 1: optax.sgd(RATE)}, lambda p: jax.tree.map(lambda x: x.ndim % 2, p)
    ),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda step_size: optax.chain(tx, optax.scale(step_size))
    )(optax.linear_schedule(1.0, 0.5, 5)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


def random_rule(rng: random.Random) -> ls.LossScale:
    first, factor = 2.0 ** rng.randrange(2, 14), rng.choice([2, 4])
    limits = {"min_scale": first / rng.choice([2, 64]), "max_scale": first * factor**2}
    counts = {name: rng.randrange(1, 4) for name in ("growth_interval", "hysteresis")}
    refill = rng.choice(["finite", "growth", "change"])
    numbers = {"headroom": rng.randrange(5), "half_life": rng.choice([1, 20])}
    numbers["backoff_factor"] = counts["backoff_factor"] = rng.choice([0.5, 0.25])
    dynamic = functools.partial(ls.DynamicLossScale, hysteresis_refill=refill, **counts)
    return rng.choice(
        [
            ls.FixedLossScale(first),
            ls.HeadroomLossScale(first, **numbers, **limits),
            *[dynamic(first, growth_factor=factor, **limits)] * 2,
        ]
    )


def random_batch(rng: random.Random) -> np.ndarray:
    """Factors, slopes and flags; half of the batches have a row that may be bad."""
    batch = np.float32([[rng.gauss(), 1, 1] for _ in range(ROWS)])
    bad = [(0, np.nan), (0, np.inf), (0, -np.inf), (1, 16), (1, 256), (1, 1024), (2, 0)]
    column, value = rng.choice([*bad, *[(1, 1)] * len(bad)])
    batch[rng.randrange(ROWS), column] = value
    return batch


@dataclasses.dataclass(frozen=True, eq=False)
class RandomStep:
    """What is drawn. Its ``repr`` says all of it."""

    seed: int
    place: str
    way: str
    optimizer: str
    wrappers: list[str]
    has_master_weights: bool
    given: list[str]
    check_updates: bool
    tree: str
    event: str
    # Before the event, and after it.
    rules: tuple[ls.LossScale, ls.LossScale]
    batches: list[list[np.ndarray]] = dataclasses.field(repr=False)

    @classmethod
    def draw(cls, seed: int) -> "RandomStep":
        rng = random.Random(seed)
        way = WAYS[seed % len(WAYS)]
        has_value = way not in ("grad", "by hand")
        event, rule = rng.choice(EVENTS), random_rule(rng)
        return cls(
            seed=seed,
            place=PLACES[seed % len(PLACES)],
            way=way,
            optimizer=rng.choice([*OPTIMIZERS]),
            wrappers=rng.sample([*WRAPPERS], rng.randrange(3)),
            has_master_weights=rng.random() < 0.2,
            given=[x for x in rng.choice(GIVEN) if x != "value" or has_value],
            check_updates=rng.random() < 0.5,
            tree=rng.choice([*TREES]),
            event=event,
            rules=(rule, random_rule(rng) if event == "rule" else rule),
            batches=[[random_batch(rng) for _ in range(5)] for _ in range(2)],
        )

    @functools.cached_property
    def inner(self) -> Any:
        inner: Any = OPTIMIZERS[self.optimizer]
        for name in self.wrappers:
            inner = WRAPPERS[name](inner)
        return ls.with_master_weights(inner) if self.has_master_weights else inner

    @property
    def axis_name(self) -> str | None:
        return "d" if self.place == "shard_map" else None

    def make_params(self) -> Any:
        numbers = np.random.default_rng(self.seed)
        return TREES[self.tree](lambda *x: np.float32(numbers.normal(size=x)))

    @functools.cached_property
    def plain(self) -> Any:
        """The step of the unwrapped optimizer."""
        groups = ROWS if self.place == "shard_map" else 1
        tx = optax.chain(optax.identity(), self.inner)
        return jax.jit(functools.partial(plain_step, tx, groups))

    @functools.cache  # noqa: B019
    def wrapped(self, rule: ls.LossScale) -> tuple[Any, Any]:
        """The wrapped optimizer, and its step in the place."""
        name = self.axis_name
        total = optax.stateless(
            lambda grads, _: jax.lax.psum(grads, name) if name else grads
        )
        options = {"axis_name": name, "check_updates": self.check_updates}
        tx = ls.with_loss_scaling(optax.chain(total, self.inner), rule, **options)

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            local = vary(params, name) if name else params
            value, grads, state = differentiate(self.way, local, state, batch, name)
            extra_args = {"value": value, "grads_finite": (batch[:, 2] > 0).all()}
            extra_args = {key: extra_args[key] for key in self.given}
            updates, state = tx.update(grads, state, params, **extra_args)
            return optax.apply_updates(params, updates), state

        return tx, in_place(self.place, step)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Each row has a factor, and a slope in float16 that overflows at a high scale."""
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]
    smooth = sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(leaves))
    one = jnp.broadcast_to(leaves[0].ravel()[0], len(batch))
    half = one.astype(jnp.float16) * batch[:, 1].astype(jnp.float16)
    return jnp.sum(smooth * batch[:, 0] + half.astype(jnp.float32))


def differentiate(way: str, params: Any, state: Any, batch: Any, axis_name: Any) -> Any:
    """The value, if there is one, the gradients and the state."""
    fun = functools.partial(loss_fn, batch=batch)
    if way == "value_and_grad":
        return *ls.value_and_grad(fun, state)(params), state
    if way == "grad":
        return None, ls.grad(fun, state)(params), state
    if way == "by hand":
        grads = jax.grad(lambda params: ls.scale_loss(fun(params), state))(params)
        return None, ls.unscale_grads(grads, state), state
    if way == "scale_backward":
        return *jax.value_and_grad(ls.scale_backward(fun, state))(params), state
    options = {"max_retries": 2, "axis_name": axis_name}
    return ls.value_and_grad_with_retries(fun, state, **options)(params)


def plain_step(tx: Any, groups: int, carry: Any, batch: Any) -> Any:
    """The unwrapped optimizer's step, and the largest gradient of a group of rows."""
    params, state = carry
    rows = batch.reshape(groups, -1, batch.shape[-1])
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, rows)
    largest = [jnp.max(jnp.abs(g)).astype(jnp.float32) for g in jax.tree.leaves(grads)]
    grads = jax.tree.map(lambda g: jnp.sum(g, 0), grads)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), jnp.stack(largest).max()


def in_place(place: str, step: Any) -> Any:
    """A step that runs in a place; its types and so its program stay the same."""
    if place == "eager":
        return step
    if place == "shard_map":
        return on_mesh(step, (P(), P("d")), P(), MESH)
    chex.clear_trace_counter()
    step = chex.assert_max_traces(step, n=1)
    if place != "vmap":
        return jax.jit(step, donate_argnums=0 if place == "donation" else ())
    members = jax.jit(jax.vmap(step))

    def bad(x: Any) -> Any:
        return np.full_like(x, np.nan if jnp.issubdtype(x.dtype, np.floating) else 0)

    def beside_a_bad_one(*args: Any) -> Any:
        both = jax.tree.map(lambda x: np.stack([x, bad(x)]), args)
        return jax.tree.map(lambda x: x[0], jax.device_get(members(*both)))

    return beside_a_bad_one


def run(place: str, step: Any, carry: Any, batches: list[np.ndarray]) -> list[Any]:
    """What is carried after each step, as NumPy arrays."""
    if place == "scan":
        carries = jax.lax.scan(lambda *x: (step(*x),) * 2, carry, np.stack(batches))[1]
        carries = jax.device_get(carries)
        return [jax.tree.map(lambda x, t=t: x[t], carries) for t in range(len(batches))]
    carries = [jax.device_get(carry)]
    for batch in batches:
        args = jax.tree.map(jnp.array, (carries[-1], batch))
        args = jax.tree.map(shard, args) if place == "mesh" else args
        carries.append(jax.device_get(step(*args)))
    return carries[1:]


def shard(x: jax.Array) -> jax.Array:
    rows = x.ndim and x.shape[0] % ROWS == 0
    return jax.device_put(x, NamedSharding(MESH, P("d") if rows else P()))


def simulate(
    rule: Simulated, case: RandomStep, batch: np.ndarray, largest: float
) -> bool:
    """Whether the step is applied, after the simulated rule has seen it."""
    x, slope, flags = batch.T

    def finite() -> bool:
        with np.errstate(over="ignore"):
            half = np.float16(rule.scale) * np.float16(slope)
        return bool(np.isfinite(half).all() and np.isfinite(x).all())

    for _ in range(2 if case.way == "retries" and np.isfinite(x).all() else 0):
        if not finite():
            rule.scale, rule.growth = rule.scale / 2, 0
    applied = finite() and bool(flags.all() or "grads_finite" not in case.given)
    if "value" in case.given and not np.isfinite(x).all():
        rule.record(False)
    else:
        rule.update(applied, largest)
    return applied
