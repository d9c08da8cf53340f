"""What decides whether a step is applied, what it leaves, and what the scale learns.

Wherever train steps run: good ones are Optax's, and bad ones leave no trace.
"""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, noted
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh, set_mesh
from shared import slow_but
from training import normal

import optax_lossscale as ls

pytestmark = [
    pytest.mark.usefixtures("new_process"),  # else they warn that no loss was scaled
    # Optax turns a bfloat16 average into float32.
    pytest.mark.filterwarnings("ignore:Every update rounds the state"),
]

ROWS = 4
DICT, NESTED = {"w": normal(4, 3), "b": normal(3)}, [normal(), (normal(8), None)]
BFLOAT16 = normal(2, 2).astype(jnp.bfloat16), {"b": normal(2)}
RATE, ADAM = optax.linear_schedule(1e-3, 5e-4, 5), optax.adam(1e-3)
LION = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(RATE), optax.ema(0.9))
DYNAMIC = ls.DynamicLossScale(2.0**9, growth_interval=2, hysteresis=2)
GREEDY = ls.DynamicLossScale(2.0**8, growth_interval=1, min_scale=2.0**7)
HEADROOM, FIXED = ls.HeadroomLossScale(2.0**8), ls.FixedLossScale(2.0**7)
# The optimizer, its parameters, the rule, and whether it checks updates.
RUNS = {
    "adam": (ADAM, DICT, DYNAMIC, True),
    "MultiSteps": (optax.MultiSteps(ADAM, 2), NESTED, GREEDY, True),
    "clip, lion, headroom": (LION, DICT, HEADROOM, False),
    "master weights": (ls.with_master_weights(ADAM), BFLOAT16, FIXED, True),
}
INF, NAN = np.inf, np.nan
# A row of a batch: its factor; its slope in float16, where gradients overflow; the root
# whose gradient is NaN at 0; its flag; and what is added to its loss.
GOOD = {"factor": 0.5, "slope": 1.0, "root": 1.0, "flag": 1.0, "added": 0.0}
# What one such row makes happen to a step.
STEPS = [
    ("applied", {}),
    ("overflow", {"slope": 2.0**12}),
    ("overflow", {"slope": -(2.0**12)}),
    ("overflow", {"root": 0.0}),
    ("applied", {"slope": 16.0}),
    ("overflow", {"flag": 0.0}),
    ("applied", {}),
    # No scale cures a loss that is not finite.
    *(("skipped", {"added": x}) for x in (NAN, INF, -INF)),
    ("skipped", {"factor": NAN}),
    ("applied", {}),
    ("skipped", {"slope": 2.0**12, "added": NAN}),
    ("skipped", {"flag": 0.0, "added": NAN}),
    ("applied", {}),
]


def is_explicit(tree):
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return EXPLICIT in meshes[0].axis_types


def loss_fn(params, batch):
    if is_explicit(params):
        params, batch = jax.sharding.reshard((params, batch), P())
    factor, slope, root, _, added = batch.T
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]
    smooth = sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(leaves))
    one = jnp.broadcast_to(leaves[0].ravel()[0], len(batch))
    half = one.astype(jnp.float16) * slope.astype(jnp.float16)
    rest = half.astype(jnp.float32) + jnp.sqrt(jnp.abs(one) * root) + added
    return jnp.sum(smooth * factor + rest)


def in_scan(step):
    def scan(carry, batch):
        return jax.lax.scan(lambda *x: (step(*x), None), carry, batch[None])[0]

    return jax.jit(scan)


def beside_a_bad_one(step):
    def both(*args):
        is_real = functools.partial(jnp.isdtype, kind="real floating")
        bad = jax.tree.map(lambda x: x * jnp.nan if is_real(x.dtype) else x, args)
        both = jax.vmap(step)(*jax.tree.map(lambda *x: jnp.stack(x), args, bad))
        return jax.tree.map(lambda x: x[0], both)

    return jax.jit(both)


def on_shards(axis_type, step):
    """Rows are split along one axis of a mesh, and columns along the other."""

    def sharded(*args):
        shardings = jax.tree.map(lambda x: sharding_of(x, axis_type), args)
        with set_mesh(make_mesh(axis_type, d=2, e=2)):
            return jax.jit(step, donate_argnums=0)(*jax.device_put(args, shardings))

    return sharded


def sharding_of(x, axis_type):
    sizes = zip(x.shape, "de", strict=False)
    names = [name if size % 2 == 0 else None for size, name in sizes]
    return NamedSharding(make_mesh(axis_type, d=2, e=2), P(*names))


@functools.partial(jax.jit, static_argnums=(0, 1))
def plain_step(inner, rule, run, batch, applied):
    """The step of Optax, and the scale after a step that is applied or overflows."""
    params, state = run
    grads = jax.grad(loss_fn)(params, batch)
    updates, inner_state = inner.update(grads, state.inner_state, params)
    largest = (ls.max_magnitude(grads),) if rule.uses_max_magnitude else ()
    scale = rule.update(state.scale_state, applied, *largest)
    return (optax.apply_updates(params, updates), inner_state), scale


PLACES = {
    "donation": lambda step: jax.jit(step, donate_argnums=0),
    "scan": in_scan,
    "vmap": beside_a_bad_one,
    "shard_map": lambda step: on_mesh(step, (P(), P("d")), P(), make_mesh(d=ROWS)),
    "mesh": functools.partial(on_shards, AUTO),
    "explicit mesh": functools.partial(on_shards, EXPLICIT),
    "eager": lambda step: step,
}
QUICK = ("donation", "scan", "vmap", "shard_map", "explicit mesh")


@functools.cache
def steps_of(place, run):
    """Each step: its kind, the run before it and after it, and what Optax makes.

    After each one the run goes on from a pickled state.
    """
    inner, params, rule, check_updates = RUNS[run]
    axis_name = "d" if place == "shard_map" else None
    options = {"axis_name": axis_name, "check_updates": check_updates}
    tx = ls.with_loss_scaling(inner, rule, **options)

    def step(carry, batch):
        params, state = carry
        value, grads = ls.value_and_grad(loss_fn, state)(params, batch)
        given = {"value": value, "grads_finite": (batch[:, 3] > 0).all()}
        updates, state = tx.update(grads, state, params, **given)
        return optax.apply_updates(params, updates), state

    new, placed_step, steps = (params, tx.init(params)), PLACES[place](step), []
    for t, (kind, changed) in enumerate(STEPS):
        batch = np.float32([[*GOOD.values()]] * ROWS)
        batch[t % ROWS] = [*(GOOD | changed).values()]
        old = pickle.loads(pickle.dumps(jax.device_get(new)))
        new = placed_step(jax.tree.map(jnp.array, old), jnp.array(batch))
        plain = plain_step(inner, rule, old, batch, kind == "applied")
        steps.append((kind, old, new, plain))
    return steps


of_each_run = pytest.mark.parametrize("run", slow_but(["adam"], RUNS))
in_each_place = pytest.mark.parametrize("place", slow_but(QUICK, PLACES))


@of_each_run
@in_each_place
def test_step_equals_that_of_optax_or_changes_nothing(place, run):
    rtol = 2.0**-7 if run == "master weights" else 2e-5  # of bfloat16
    for t, (kind, old, new, (optaxs, _)) in enumerate(steps_of(place, run)):
        before, after = ((params, state.inner_state) for params, state in (old, new))
        with noted(f"step {t}"):
            if kind == "applied":
                chex.assert_trees_all_close(after, optaxs, rtol=rtol, atol=2e-6)
            else:
                assert_same_bits(after, before)


@of_each_run
@in_each_place
def test_scale_follows_its_rule_and_stays_if_the_loss_is_not_finite(place, run):
    for t, (kind, (_, old), (_, new), (_, by_rule)) in enumerate(steps_of(place, run)):
        with noted(f"step {t}"):
            if kind == "skipped":
                assert_same_bits(new.scale_state, old.scale_state.record(False))
            else:
                chex.assert_trees_all_close(new.scale_state, by_rule, rtol=1e-5)


@of_each_run
def test_step_keeps_the_shardings_on_an_explicit_mesh(run):
    for _, _, new, _ in steps_of("explicit mesh", run):
        for x in jax.tree.leaves(new):
            assert x.sharding.is_equivalent_to(sharding_of(x, EXPLICIT), x.ndim)


def test_flag_and_loss_may_be_none():
    tx, bad = ls.with_loss_scaling(ADAM), {**DICT, "b": np.float32([1, NAN, 1])}
    update = jax.jit(functools.partial(tx.update, grads_finite=None, value=None))
    assert ls.was_applied(update(DICT, tx.init(DICT), DICT)[1])
    assert not ls.was_applied(update(bad, tx.init(DICT), DICT)[1])


class NeverSkips(ls.LossScale):
    """A user's rule, which counts what it is told."""

    skip_nonfinite = False

    def init(self):
        return ls.LossScaleState.create(8.0)

    def update(self, state, grads_finite):
        return state.record(grads_finite)


def test_rule_that_never_skips_applies_every_step_and_is_told_so():
    """Whatever the gradients, the flag and the loss are."""
    rule = NeverSkips()
    tx, bad = ls.with_loss_scaling(ADAM, rule), jax.tree.map(lambda p: p + NAN, DICT)
    update = jax.jit(functools.partial(tx.update, grads_finite=False, value=NAN))
    updates, state = update(bad, tx.init(DICT), DICT)
    expected = jax.jit(ADAM.update)(bad, ADAM.init(DICT), DICT)
    assert_same_bits((updates, state.inner_state), expected)
    assert_same_bits(state.scale_state, rule.init())
