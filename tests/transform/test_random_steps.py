"""Random train steps: good ones are the optimizer's own, bad ones leave no trace.

An optimizer under wrappers, a rule, a way to make gradients, a place and a tree, all by
chance, with an event in the middle. `random_optimizers` makes up optimizers.
"""

import functools
import operator
import pickle
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from devices import vary
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from shared import slow_but
from simulated_rules import Simulated

import optax_lossscale as ls

ROWS = 4
MESH = make_mesh(d=ROWS)
PLACES = ["eager", "jit", "donation", "scan", "vmap", "shard_map", "mesh"]
WAYS = ["value_and_grad", "grad", "by hand", "scale_backward", "retries"]
TREES = [
    lambda leaf: {"w": leaf(ROWS, 3), "b": leaf(3)},
    lambda leaf: [leaf(), (leaf(8, 2), None)],
    lambda leaf: leaf(ROWS),
    lambda leaf: (leaf(2, 2).astype(jnp.bfloat16), {"b": leaf(2)}),
]
RATE, CLIP = optax.linear_schedule(1e-3, 5e-4, 5), optax.clip_by_global_norm(1.0)
OPTIMIZERS = [
    *(optax.sgd(RATE), optax.sgd(RATE, momentum=0.9), optax.adam(1e-3)),
    *(optax.adamw(RATE), optax.lion(RATE), optax.rmsprop(RATE), optax.lamb(RATE)),
    optax.adafactor(RATE, min_dim_size_to_factor=2),
]
WRAPPERS = [
    lambda tx: optax.chain(CLIP, tx, optax.ema(0.9)),
    lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 0, p)),
    lambda tx: optax.partition(
        {0: tx, 1: optax.sgd(RATE)}, lambda p: jax.tree.map(lambda x: x.ndim % 2, p)
    ),
    lambda tx: optax.inject_hyperparams(
        lambda step_size: optax.chain(tx, optax.scale(step_size))
    )(optax.linear_schedule(1.0, 0.5, 5)),
    lambda tx: optax.apply_if_finite(tx, 3),
]


def loss_fn(params, batch):
    """Each row has a factor, and a slope in float16 that overflows at a high scale."""
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]
    smooth = sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(leaves))
    one = jnp.broadcast_to(leaves[0].ravel()[0], len(batch))
    half = one.astype(jnp.float16) * batch[:, 1].astype(jnp.float16)
    return jnp.sum(smooth * batch[:, 0] + half.astype(jnp.float32))


def differentiate(way, params, state, batch, axis_name):
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


def plain_step(tx, groups, carry, batch):
    """The unwrapped optimizer's step, and the largest gradient of a group of rows."""
    params, state = carry
    rows = batch.reshape(groups, -1, batch.shape[-1])
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, rows)
    largest = [jnp.max(jnp.abs(g)).astype(jnp.float32) for g in jax.tree.leaves(grads)]
    grads = jax.tree.map(lambda g: jnp.sum(g, 0), grads)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), jnp.stack(largest).max()


def in_place(place, step):
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

    def beside_a_bad_one(*args):
        both = jax.tree.map(lambda x: jnp.stack([x, jnp.full_like(x, jnp.nan)]), args)
        return jax.tree.map(lambda x: x[0], members(*both))

    return beside_a_bad_one


def run(place, step, carry, batches):
    """What is carried after each step."""
    if place == "scan":
        carries = jax.lax.scan(lambda *x: (step(*x),) * 2, carry, jnp.stack(batches))[1]
        steps = range(len(batches))
        return [jax.tree.map(operator.itemgetter(t), carries) for t in steps]
    carries = [carry]
    for batch in batches:
        args = jax.tree.map(jnp.copy, (carries[-1], batch))
        args = jax.tree.map(shard, args) if place == "mesh" else args
        carries.append(step(*args))
    return carries[1:]


def shard(x):
    rows = x.ndim and x.shape[0] % ROWS == 0
    return jax.device_put(x, NamedSharding(MESH, P("d") if rows else P()))


def random_rule(rng):
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


def random_batch(rng):
    """Factors, slopes and flags; half of the batches have a row that may be bad."""
    batch = np.float32([[rng.gauss(), 1, 1] for _ in range(ROWS)])
    bad = [(0, np.nan), (0, np.inf), (0, -np.inf), (1, 16), (1, 256), (1, 1024), (2, 0)]
    column, value = rng.choice([*bad, *[(1, 1)] * len(bad)])
    batch[rng.randrange(ROWS), column] = value
    return batch


def simulate(rule, way, batch, given, largest):
    """Whether the step is applied, after the simulated rule has seen it."""
    x, slope, flags = batch.T

    def finite():
        with np.errstate(over="ignore"):
            half = np.float16(rule.scale) * np.float16(slope)
        return np.isfinite(half).all() and np.isfinite(x).all()

    for _ in range(2 if way == "retries" and np.isfinite(x).all() else 0):
        if not finite():
            rule.scale, rule.growth = rule.scale / 2, 0
    applied = finite() and (flags.all() or "grads_finite" not in given)
    if "value" in given and not np.isfinite(x).all():
        rule.record(False)
    else:
        rule.update(applied, largest)
    return applied


@pytest.mark.usefixtures("new_process")  # no loss that is scaled is said not to be
@pytest.mark.parametrize("seed", slow_but(range(6), range(120)))
def test_good_steps_are_those_of_the_optimizer_and_bad_ones_leave_no_trace(seed):
    rng = random.Random(seed)
    place, way = PLACES[seed % len(PLACES)], WAYS[seed % len(WAYS)]
    inner = rng.choice(OPTIMIZERS)
    for wrap in rng.sample(WRAPPERS, rng.randrange(3)):
        inner = wrap(inner)
    inner = ls.with_master_weights(inner) if rng.random() < 0.2 else inner
    given = rng.choice([(), ("value",), ("grads_finite",), ("value", "grads_finite")])
    given = [x for x in given if x != "value" or way not in ("grad", "by hand")]
    axis_name, groups = ("d", ROWS) if place == "shard_map" else (None, 1)
    options = {"axis_name": axis_name, "check_updates": rng.random() < 0.5}
    total = optax.stateless(
        lambda grads, _: jax.lax.psum(grads, "d") if axis_name else grads
    )
    plain = optax.chain(optax.identity(), inner)
    plain = jax.jit(functools.partial(plain_step, plain, groups))

    @functools.cache
    def wrapped(rule):
        tx = ls.with_loss_scaling(optax.chain(total, inner), rule, **options)

        def step(carry, batch):
            params, state = carry
            local = vary(params, "d") if axis_name else params
            value, grads, state = differentiate(way, local, state, batch, axis_name)
            extra_args = {"value": value, "grads_finite": (batch[:, 2] > 0).all()}
            extra_args = {name: extra_args[name] for name in given}
            updates, state = tx.update(grads, state, params, **extra_args)
            return optax.apply_updates(params, updates), state

        return tx, in_place(place, step)

    numbers = np.random.default_rng(seed)
    params = rng.choice(TREES)(
        lambda *shape: jnp.asarray(numbers.normal(size=shape), jnp.float32)
    )
    narrow = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    rtol, rule = 2.0**-7 if narrow else 2e-5, random_rule(rng)
    state = wrapped(rule)[0].init(params)
    simulated = Simulated(rule)
    for event in ["none", rng.choice(["pickle", "rule", "scale"])]:
        if event == "pickle":
            state = pickle.loads(pickle.dumps(state))
        elif event == "scale":
            simulated.scale = 2.0 ** rng.randrange(2, 12)
            state = optax.tree.set(state, loss_scale=jnp.float32(simulated.scale))
        elif event == "rule":
            before, rule = rule, random_rule(rng)
            if any(isinstance(x, ls.HeadroomLossScale) for x in (before, rule)):
                simulated = Simulated(rule)
                state = state._replace(scale_state=rule.init())
            simulated.rule = rule
        batches = [random_batch(rng) for _ in range(5)]
        for batch, (new_params, new_state) in zip(
            batches, run(place, wrapped(rule)[1], (params, state), batches), strict=True
        ):
            old, new = (params, state.inner_state), (new_params, new_state.inner_state)
            expected, largest = plain(old, batch)
            applied = simulate(simulated, way, batch, given, float(largest))
            simulated.assert_is(new_state.scale_state)
            if applied:
                chex.assert_trees_all_close(new, expected, rtol=rtol, atol=2e-6)
            else:
                assert_same_bits(new, old)
            params, state = new_params, new_state
