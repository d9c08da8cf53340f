"""A wrong train step is told at its first step; right ones are silent.

Ways to make gradients, right and wrong, are crossed with the places where a step runs.
All but eager steps are only traced. Those call compiled losses and optimizers.
"""

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import pickle
import random
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import noted
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from meshes import on_mesh
from shared import slow_but

import optax_lossscale as ls

pytestmark = pytest.mark.usefixtures("new_process")
OPTIMIZERS = [
    optax.GradientTransformation(tx.init, jax.jit(tx.update))
    for tx in (
        optax.adam(0.1),
        optax.sgd(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        ls.with_master_weights(optax.sgd(0.1, momentum=0.9)),
    )
]
apply_updates = jax.jit(optax.apply_updates)


@jax.jit
def loss_fn(params, x):
    b, w = jax.tree.leaves(params)
    return jnp.mean((x * w + b) ** 2)


class Net:
    """Parameters, and all that trains them."""

    def __init__(self, optimizer=OPTIMIZERS[0], width=2, names=("w", "b"), rule=None):
        self.tx = ls.with_loss_scaling(optimizer, rule or ls.DynamicLossScale())
        x = np.ones(width, np.float32)
        params = dict.fromkeys(names, x)
        self.args = params, self.tx.init(params), x

    def apply(self, params, state, grads):
        updates, state = self.tx.update(grads, state, params)
        return apply_updates(params, updates), state

    def step(self, way):
        return lambda p, s, x: self.apply(p, *gradients(way, p, s, x)[::-1])


# Ways to make gradients, of parameters, a state and a batch.


def gradients(way, *args):
    """With the state, which only retries return."""
    grads = way(*args)
    return grads if isinstance(grads, tuple) else (grads, args[1])


def apart(way):
    """As a compiled function of its own."""
    return jax.jit(lambda *args: gradients(way, *args))


def unscaled(params, state, x):
    return jax.grad(loss_fn)(params, x)


def scaled(params, state, x):
    return jax.grad(lambda p: ls.scale_loss(loss_fn(p, x), state))(params)


def true(params, state, x):
    return ls.grad(loss_fn, state)(params, x)


def by_hand(params, state, x):
    return ls.unscale_grads(scaled(params, state, x), state)


def by_getter(params, state, x):
    grads = jax.grad(lambda p: ls.get_loss_scale(state) * loss_fn(p, x))(params)
    return ls.unscale_grads(grads, state)


def by_trainer(params, state, x):
    return jax.grad(ls.scale_backward(loss_fn, state))(params, x)


def retried(params, state, x):
    return ls.value_and_grad_with_retries(loss_fn, state)(params, x)[1:]


def summed(params, state, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, true(params, state, x)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, jnp.stack([x, x]))[0]


def penalized(params, state, x):
    """An inner gradient is scaled and divided by hand, as PyTorch's recipe does."""

    def loss(params):
        slope = by_hand(params, state, x)
        return loss_fn(params, x) + optax.tree.norm(slope, squared=True)

    return ls.grad(loss, state)(params)


def meta_learned(params, state, x):
    """An inner loop, with a scale of its own, inside of the scaled loss."""

    def outer_loss(params):
        tx = ls.with_loss_scaling(optax.sgd(0.1))
        inner = tx.init(params)
        updates, _ = tx.update(by_hand(params, inner, x), inner, params)
        return loss_fn(optax.apply_updates(params, updates), x)

    return ls.grad(outer_loss, state)(params)


def scaled_twice(params, state, x):
    return ls.grad(lambda p: ls.scale_loss(loss_fn(p, x), state), state)(params)


def divided_twice(way):
    return lambda *args: ls.unscale_grads(*gradients(way, *args))


def after_an_error(params, state, x):
    """A loss that raised is not scaled, and a function that is only made neither."""
    repr(ls.value_and_grad(loss_fn, state))
    for make in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            make(lambda params: 1 // 0, state)(params)
    return unscaled(params, state, x)


RIGHT = {
    "value_and_grad": true,
    "by hand": by_hand,
    "by the getter": by_getter,
    "by a trainer": by_trainer,
    "retries": retried,
    "micro-batches": summed,
    "penalty": penalized,
    "meta-learning": meta_learned,
    "the scale alone": lambda p, s, x: true(p, ls.get_loss_scale_state(s), x),
    "two losses": lambda *args: jax.tree.map(jnp.add, true(*args), by_hand(*args)),
    # What is logged is the scaled loss, which nobody differentiates.
    "a log": lambda p, s, x: (ls.scale_loss(loss_fn(p, x), s), true(p, s, x))[1],
}
WRONG = {
    "unscaled": (unscaled, "No loss has been scaled for this optimizer state"),
    "after an error": (after_an_error, "No loss has been scaled for this"),
    "scaled": (scaled, "`scale_loss` has scaled a loss, but `unscale_grads` has"),
    "scaled twice": (scaled_twice, "The loss is scaled twice"),
}
for name in ("value_and_grad", "retries", "by hand", "by the getter"):
    way = divided_twice(RIGHT[name])
    WRONG[f"{name}, twice"] = way, "The gradients are divided by the loss scale twice"


# Programs of a network and a way. Most places are traced.

AROUND = {
    "jit": lambda step: step,
    "checkpoint": jax.checkpoint,
    "scan": lambda step: (
        lambda p, s, x: jax.lax.scan(
            lambda carry, x: (step(*carry, x), None), (p, s), x[None]
        )
    ),
    "fori_loop": lambda step: (
        lambda p, s, x: jax.lax.fori_loop(
            0, 2, lambda _, carry: step(*carry, x), (p, s)
        )
    ),
    "vmap": lambda step: (
        lambda *args: jax.vmap(step)(*jax.tree.map(lambda x: jnp.stack([x, x]), args))
    ),
    "shard_map": lambda step: on_mesh(step, (P(), P(), P()), P()),
}


def traced(net, way, around="jit"):
    jax.eval_shape(AROUND[around](net.step(way)), *net.args)


def eager(net, way, args=None, times=1):
    params, state, x = args or net.args
    for _ in range(times):
        params, state = net.step(way)(params, state, x)


def from_host(net, way):
    eager(net, way, jax.device_get(net.args))


def restored(net, way):
    traced(net, way)
    eager(net, way, pickle.loads(pickle.dumps(net.args)))


def cells(net, way):
    """A cell that runs again, after a look at the shapes."""
    for _ in range(2):
        jax.eval_shape(net.tx.init, net.args[0])
        jax.make_jaxpr(net.step(way))(*net.args)


TRACED = {name: functools.partial(traced, around=name) for name in AROUND}
PLACES = {**TRACED, "eager": eager, "host": from_host}
RIGHT_PLACES = {**PLACES, "restored": restored, "cells": cells}


# Right programs in parts, whose objects differ between loss and update, and others.


def halves(net, way):
    """In a sweep, where the function that makes the gradients is kept."""
    gradient = apart(way)
    for _ in range(2):
        (params, state, x), update = net.args, jax.jit(net.apply)
        for _ in range(2):
            grads, state = jax.eval_shape(gradient, params, state, x)
            params, state = jax.eval_shape(update, params, state, grads)


def unscaled_apart(net, way, read=lambda state: state):
    unscale = jax.jit(lambda *args: ls.unscale_grads(*args))
    eager(net, lambda p, s, x: unscale(scaled(p, s, x), read(s)), times=2)


def zero(net, way):
    """The state is sharded, and gradients are made in `shard_map`."""
    net = Net()  # `map_params` of Optax takes no master weights
    params, state, _ = jax.tree.map(lambda _: P(), net.args)
    traced(net, on_mesh(true, (params, state, P()), P()))


def two_models_at_scales_alone(net, way):
    """Both gradients come before both updates."""
    for way, read in ((by_trainer, ls.get_loss_scale), (true, ls.get_loss_scale_state)):
        gradient, nets = apart(way), [Net(), Net(width=3)]
        args = [(params, read(state), x) for params, state, x in (n.args for n in nets)]
        for n, (grads, _) in zip(nets, [gradient(*a) for a in args], strict=True):
            n.apply(*n.args[:2], grads)


def beside_others(net, way):
    """As in a GAN: all gradients, then all updates. Two optimizers share some."""
    other = Net(OPTIMIZERS[1], len(net.args[2]))

    def step(*args):
        args = [args, (other.args[0], net.tx.init(other.args[0]), other.args[2])]
        all_grads = [gradients(way, *a) for a in args]
        other.apply(*other.args[:2], true(*args[0]))
        net.apply(*args[1][:2], all_grads[1][0])
        return net.apply(args[0][0], *all_grads[0][::-1])

    jax.eval_shape(step, *net.args)


def beside_a_fixed_scale(net, way):
    """The update of the other optimizer does not use up the scale."""
    params, state, x = net.args
    grads, _ = apart(true)(params, state.scale_state, x)
    eager(Net(rule=ls.FixedLossScale(1.0)), unscaled)
    net.apply(params, state, grads)


def beside_one_scale(net, way):
    """One scale for several optimizers, which only skip."""
    rule, skips = ls.DynamicLossScale(), Net(rule=ls.FixedLossScale(1.0))

    def step(scale_state, params, state, x):
        grads = true(params, scale_state, x)
        scale_state = rule.update(scale_state, ls.all_finite(grads))
        return skips.apply(params, state, grads), scale_state

    jax.eval_shape(step, rule.init(), *skips.args)


def one_step_late(net, way):
    """As in pipelines: the gradients of a step are applied in the next one."""
    late = [gradients(way, *net.args)[0]]

    def one_late(*args):
        late.append(gradients(way, *args)[0])
        return late.pop(0)

    eager(net, one_late, times=2)


def for_two_steps(net, way):
    grads, _ = apart(way)(*net.args)
    eager(net, lambda *args: grads, times=2)


def with_an_integer(net, way):
    def with_count(params, state, x):
        grads = {**scaled(params, state, x), "count": count}
        return {name: ls.unscale_grads(grads, state)[name] for name in params}

    count = jax.device_put(np.int32(3))
    eager(net, with_count, times=2)


def train_state(net, way):
    def step(state, x):
        return state.apply_gradients(grads=true(state.params, state, x))

    params, _, x = net.args
    jax.eval_shape(step, TrainState.create(apply_fn=None, params=params, tx=net.tx), x)


def nnx_optimizer(net, way, make=ls.value_and_grad, outer=nnx.jit, inner=lambda f: f):
    @inner
    def gradient(model, optimizer):
        fun = make(lambda m: m(x).sum(), optimizer, value_and_grad=nnx.value_and_grad)
        return fun(model)[1]

    @inner
    def update(model, optimizer, grads):
        optimizer.update(model, grads)

    @outer
    def step(model, optimizer):
        update(model, optimizer, gradient(model, optimizer))

    x, model = np.ones(2, np.float32), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    # That of Flax 0.11 takes no master weights.
    step(model, nnx.Optimizer(model, Net().tx, wrt=nnx.Param))


PARTS = [halves, unscaled_apart, zero, two_models_at_scales_alone]
PARTS += [beside_others, beside_a_fixed_scale, beside_one_scale, one_step_late]
PARTS += [for_two_steps, with_an_integer, train_state, nnx_optimizer]
PARTS = {part.__name__: part for part in PARTS} | {
    "unscaled by the scale alone": functools.partial(
        unscaled_apart, read=ls.get_loss_scale_state
    ),
    "nnx retries": functools.partial(
        nnx_optimizer, make=ls.value_and_grad_with_retries
    ),
    "nnx halves": functools.partial(nnx_optimizer, outer=lambda f: f, inner=nnx.jit),
    "inner jit": lambda net, way: [traced(net, f) for f in 2 * [apart(way)]],
    # Each call traces anew: the scale is a constant of each, and none is wrong.
    "eager scan": lambda net, way: eager(net, summed, times=2),
    "a trainer at a number": lambda net, way: eager(
        net, apart(lambda p, s, x: by_trainer(p, 8.0, x)), times=2
    ),
    "scale 1": lambda net, way: traced(Net(rule=ls.FixedLossScale(1.0)), unscaled),
}


def told(program, net, way):
    """All warnings, but that master weights are copies of parameters in float32."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program(net, way)
    return [str(w.message) for w in seen if "float32 copies" not in str(w.message)]


def assert_told(program, net, way, message):
    [text] = told(program, net, way)
    assert text.startswith(message)


NET = Net()  # of all tables: a new process has no notes of its state
# A network, and one of which nothing follows for it.
OTHERS = {
    "moments": (NET, Net(OPTIMIZERS[-1])),
    "names": (NET, Net(names=("kernel", "bias"))),
    "no arrays": (Net(OPTIMIZERS[1]), Net(OPTIMIZERS[2])),
}


CELLS = [*itertools.product(RIGHT, RIGHT_PLACES)]
QUICK = [cell for cell in CELLS if {"by hand", "retries", "jit", "eager"} & {*cell}]


@pytest.mark.parametrize("cell", slow_but(QUICK, CELLS), ids=" ".join)
def test_right_step_is_silent(cell):
    way, place = cell
    assert told(RIGHT_PLACES[place], NET, RIGHT[way]) == []


@pytest.mark.parametrize("part", PARTS)
def test_right_program_in_parts_is_silent(part):
    assert told(PARTS[part], NET, true) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WRONG)
def test_wrong_step_is_told_once_and_no_right_one_after_it(way, place):
    assert_told(PLACES[place], NET, *WRONG[way])
    assert told(PLACES[place], NET, true) == []


@pytest.mark.parametrize("seed", slow_but(range(10), range(40)))
def test_random_right_programs_follow_a_wrong_one(seed):
    """It comes first: after a right one, its gradients might be those of any other."""
    rng = random.Random(seed)
    place, wrong = rng.choice([*PLACES]), rng.choice([*WRONG])
    with noted(place, wrong):
        assert_told(PLACES[place], Net(rng.choice(OPTIMIZERS)), *WRONG[wrong])
    programs = {**RIGHT_PLACES, **PARTS}
    for _ in range(rng.randint(1, 4)):
        name, way = rng.choice([*programs, *PARTS]), rng.choice([*RIGHT])
        net = Net(rng.choice(OPTIMIZERS), rng.choice([2, 3]))
        with noted(name, way):
            assert told(programs[name], net, RIGHT[way]) == []


@pytest.mark.parametrize(("net", "other"), OTHERS.values(), ids=OTHERS)
def test_right_model_hides_no_wrong_one_of_another_structure(net, other):
    for program in (halves, unscaled_apart):
        assert told(program, other, true) == []
    assert_told(traced, net, *WRONG["unscaled"])
    assert_told(traced, net, *WRONG["scaled"])


def closed_over(way, state):
    """A gradient function that was built once holds the first scale."""
    return lambda params, _, x: gradients(way, params, state, x)[0]


@pytest.mark.parametrize("place", TRACED)
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_constant_scale_is_told_where_a_traced_update_reads_another(way, place):
    message = "The loss scale, 32768, is a constant of a compiled function"
    assert_told(TRACED[place], NET, closed_over(way, NET.args[1]), message)
    # That of a fixed rule is right.
    fixed = closed_over(way, ls.FixedLossScale().init())
    assert told(TRACED[place], NET, fixed) == []


def jvp(step):
    def at_scale(params, scale, x):
        scale_state = NET.args[1].scale_state._replace(loss_scale=scale)
        return step(params, NET.args[1]._replace(scale_state=scale_state), x)[0]

    return lambda p, s, x: jax.jvp(at_scale, *2 * [(p, s.scale_state.loss_scale, x)])


@pytest.mark.parametrize("around", [lambda step: step, AROUND["vmap"], jvp])
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_constant_scale_is_right_in_eager_programs(way, around):
    """They read it each time, also where they map or differentiate."""
    step = around(NET.step(closed_over(way, NET.args[1])))
    assert told(lambda *_: step(*NET.args), NET, way) == []


def test_arrays_and_static_data_of_a_model_are_freed():
    """Of an eager step. JAX itself keeps the static data of a compiled one."""

    def run(tx, static):
        params = jax.tree_util.Partial(static, np.ones(2, np.float32))
        state = tx.init(params)
        grads = ls.grad(lambda p: p().sum(), state)(params)
        tx.update(grads, state, params)
        alive = static, *jax.tree.leaves(grads), state.scale_state.loss_scale
        return [weakref.ref(x) for x in alive]

    refs = run(ls.with_loss_scaling(optax.sgd(0.1, momentum=0.9)), lambda w: w)
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_threads_do_not_disturb_each_other():
    """They share one state, whose notes all of them write."""

    def train(net, way):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: eager(net, way, times=5), range(8)))

    assert told(train, Net(width=4), by_hand) == []


def test_right_step_on_the_host_hides_no_forgotten_unscale(new_process):
    tx, params = ls.with_loss_scaling(optax.sgd(0.1)), np.ones(2, np.float32)

    def scaled_grads(state):
        return jax.grad(lambda p: ls.scale_loss(jnp.sum(p**2), state))(params)

    on_host, state = jax.device_get(tx.init(params)), tx.init(params)
    tx.update(ls.unscale_grads(scaled_grads(on_host), on_host), on_host, params)
    with pytest.warns(UserWarning, match="`unscale_grads` has divided no gradients"):
        tx.update(scaled_grads(state), state, params)
