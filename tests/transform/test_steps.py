"""Train steps wherever they run: good ones are Optax's, bad ones leave no trace."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, noted
from devices import vary
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from shared import slow_but
from simulated_rules import Simulated
from training import normal

import optax_lossscale as ls

ROWS, MESH = 4, make_mesh(d=4)
DICT, NESTED = {"w": normal(4, 3), "b": normal(3)}, [normal(), (normal(8), None)]
BFLOAT16 = normal(2, 2).astype(jnp.bfloat16), {"b": normal(2)}
RATE, ADAM = optax.linear_schedule(1e-3, 5e-4, 5), optax.adam(1e-3)
LION = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(RATE), optax.ema(0.9))
DYNAMIC = ls.DynamicLossScale(2.0**9, growth_interval=2, hysteresis=2)
QUICK = ls.DynamicLossScale(2.0**8, growth_interval=1, min_scale=2.0**7)
HEADROOM, FIXED = ls.HeadroomLossScale(2.0**8, headroom=3), ls.FixedLossScale(2.0**7)
# The optimizer, parameters, the rule, and another one for the last steps.
RUNS = {
    "adam": (ADAM, DICT, DYNAMIC, QUICK),
    "MultiSteps": (optax.MultiSteps(ADAM, 2), NESTED, QUICK, FIXED),
    "lion": (LION, DICT, HEADROOM, HEADROOM),
    "copies": (ls.with_master_weights(ADAM), BFLOAT16, FIXED, DYNAMIC),
}
# What a row of a batch is: slopes overflow in float16 at a large scale.
GOOD, FLAG = (0, 0.5), (2, 0.0)
NUMBERS = [
    GOOD,
    (1, 256),
    (0, np.nan),
    (1, 16),
    GOOD,
    FLAG,
    GOOD,
    (1, 1024),
    (0, np.inf),
]
BATCHES = np.float32([[[0.5, 1, 1]] * ROWS] * len(NUMBERS))
for t, (column, number) in enumerate(NUMBERS):
    BATCHES[t, t % ROWS, column] = number


def loss_fn(params, batch):
    """Each row has a factor, and a slope in float16 that overflows at a high scale."""
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]
    smooth = sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(leaves))
    one = jnp.broadcast_to(leaves[0].ravel()[0], len(batch))
    half = one.astype(jnp.float16) * batch[:, 1].astype(jnp.float16)
    return jnp.sum(smooth * batch[:, 0] + half.astype(jnp.float32))


def in_scan(step, carry, batch):
    return jax.lax.scan(lambda *x: (step(*x), None), carry, batch[None])[0]


def beside_a_bad_one(step, *args):
    bad = jax.tree.map(
        lambda x: x * jnp.nan if jnp.isdtype(x.dtype, "real floating") else x, args
    )
    both = jax.tree.map(lambda *x: jnp.stack(x), args, bad)
    return jax.tree.map(lambda x: x[0], jax.vmap(step)(*both))


def shard(x):
    rows = x.ndim and x.shape[0] % ROWS == 0
    return jax.device_put(x, NamedSharding(MESH, P("d") if rows else P()))


PLACES = {
    "jit": jax.jit,
    "eager": lambda step: step,
    "donation": lambda step: jax.jit(step, donate_argnums=0),
    "scan": lambda step: jax.jit(functools.partial(in_scan, step)),
    "vmap": lambda step: jax.jit(functools.partial(beside_a_bad_one, step)),
    "shard_map": lambda step: on_mesh(step, (P(), P("d")), P(), MESH),
    "mesh": lambda step: lambda *args: jax.jit(step)(*jax.tree.map(shard, args)),
}


@pytest.mark.usefixtures("new_process")  # no loss that is scaled is said not to be
# Told where Optax turns a bfloat16 average into float32.
@pytest.mark.filterwarnings("ignore:Every update rounds the state")
@pytest.mark.parametrize("run", slow_but(["adam"], RUNS))
@pytest.mark.parametrize("place", slow_but([*PLACES][:1] + [*PLACES][2:], PLACES))
def test_step_is_the_optimizers_or_leaves_no_trace(place, run):
    inner, params, *rules = RUNS[run]
    is_mapped = place == "shard_map"

    def local(grads, _):
        return jax.lax.psum(grads, "d") if is_mapped else grads

    def step(tx, carry, batch):
        params, state = carry
        fun = ls.value_and_grad(functools.partial(loss_fn, batch=batch), state)
        value, grads = fun(vary(params, "d") if is_mapped else params)
        given = {"value": value, "grads_finite": (batch[:, 2] > 0).all()}
        updates, state = tx.update(grads, state, params, **given)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def plain_step(params, state, batch):
        rows = batch[:, None] if is_mapped else batch[None]
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, rows)
        largest = [jnp.max(jnp.abs(g).astype(float)) for g in jax.tree.leaves(grads)]
        grads = jax.tree.map(lambda g: jnp.sum(g, 0), grads)
        updates, state = inner.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), jnp.stack(largest).max()

    options = {"axis_name": "d" if is_mapped else None, "check_updates": run != "lion"}
    both = optax.chain(optax.stateless(local), inner)
    wrapped = [ls.with_loss_scaling(both, rule, **options) for rule in rules]
    steps = [PLACES[place](functools.partial(step, tx)) for tx in wrapped]
    carry, simulated = (params, wrapped[0].init(params)), Simulated(rules[0])
    rtol = 2.0**-7 if params is BFLOAT16 else 2e-5
    for t, batch in enumerate(BATCHES):
        simulated.rule = rules[t > 4]
        old = carry[0], carry[1].inner_state[1]
        carry = jax.tree.map(
            jnp.array, pickle.loads(pickle.dumps(jax.device_get(carry)))
        )
        carry = jax.device_get(steps[t > 4](carry, jnp.array(batch)))
        new, (expected, largest) = (
            (carry[0], carry[1].inner_state[1]),
            plain_step(*old, batch),
        )
        x, slope, flags = batch.T
        with np.errstate(over="ignore"):
            half = np.float16(simulated.scale) * np.float16(slope)
        applied = np.isfinite([half, x]).all() and flags.all()
        with noted(f"step {t}"):
            if np.isfinite(x).all():
                simulated.update(applied, float(largest))
            else:
                simulated.record(False)
            simulated.assert_is(carry[1].scale_state)
            if applied:
                chex.assert_trees_all_close(new, expected, rtol=rtol, atol=2e-6)
            else:
                assert_same_bits(new, jax.device_get(old))
