"""A wrong train step is told at its first step; right ones are silent.

Ways to make gradients, right and wrong, are crossed with the places where a step runs.
All but eager steps are only traced. Those call compiled losses and optimizers.
"""

import concurrent.futures
import contextlib
import dataclasses
import gc
import pickle
import random
import warnings
import weakref
from typing import Any

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
FORGOTTEN = "No loss has been scaled for this optimizer state"
NOT_DIVIDED = "`scale_loss` has scaled a loss, but `unscale_grads` has"
DIVIDED_TWICE = "The gradients are divided by the loss scale twice"
SCALED_TWICE = "The loss is scaled twice"
CONSTANT = "The loss scale, 32768, is a constant of a compiled function"
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "adam": optax.adam(0.1),
    "master": ls.with_master_weights(optax.sgd(0.1, momentum=0.9)),
}
for name, (init, update) in OPTIMIZERS.items():
    OPTIMIZERS[name] = optax.GradientTransformation(init, jax.jit(update))
apply_updates = jax.jit(optax.apply_updates)


@jax.jit
def loss_fn(params, x):
    b, w = jax.tree.leaves(params)
    return jnp.mean((x * w + b) ** 2)


class Net:
    """Parameters, and all that trains them."""

    def __init__(self, optimizer="adam", width=2, names=("w", "b"), rule=None):
        rule = rule or ls.DynamicLossScale()
        self.tx = ls.with_loss_scaling(OPTIMIZERS[optimizer], rule)
        x = np.ones(width, np.float32)
        params = dict.fromkeys(names, x)
        self.args = params, self.tx.init(params), x

    def apply(self, params, state, grads):
        updates, state = self.tx.update(grads, state, params)
        return apply_updates(params, updates), state

    def step(self, way):
        def step(params, state, x):
            grads, state = gradients(way, params, state, x)
            return self.apply(params, state, grads)

        return step


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


def after_an_error(params, state, x):
    """A loss that raised is not scaled, and a function that is only made neither."""
    repr(ls.value_and_grad(loss_fn, state))
    for make in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            make(lambda params: 1 // 0, state)(params)
    return unscaled(params, state, x)


RIGHT = {
    "true": true,
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
    "unscaled": (unscaled, FORGOTTEN),
    "after an error": (after_an_error, FORGOTTEN),
    "scaled": (scaled, NOT_DIVIDED),
    "scaled twice": (
        lambda p, s, x: ls.grad(lambda p: ls.scale_loss(loss_fn(p, x), s), s)(p),
        SCALED_TWICE,
    ),
    **{
        f"{name} divided twice": (
            lambda *args, way=RIGHT[name]: ls.unscale_grads(*gradients(way, *args)),
            DIVIDED_TWICE,
        )
        for name in ("true", "retries", "by hand", "by the getter")
    },
}


# Programs of a network and a way. Places: a whole step is in one program.


def jitted(net, way):
    jax.eval_shape(net.step(way), *net.args)


def eager(net, way, args=None, times=1):
    params, state, x = args or net.args
    for _ in range(times):
        params, state = net.step(way)(params, state, x)


def scan(net, way):
    def body(carry, x):
        return net.step(way)(*carry, x), None

    jax.eval_shape(lambda p, s, x: jax.lax.scan(body, (p, s), x[None]), *net.args)


def fori_loop(net, way):
    def run(params, state, x):
        body = net.step(way)
        return jax.lax.fori_loop(0, 2, lambda _, c: body(*c, x), (params, state))

    jax.eval_shape(run, *net.args)


def vmap(net, way, run=jax.eval_shape):
    args = jax.tree.map(lambda x: np.stack([x, x]), net.args)
    run(jax.vmap(net.step(way)), *args)


def shard_map(net, way):
    jax.eval_shape(on_mesh(net.step(way), (P(), P(), P()), P()), *net.args)


def checkpoint(net, way):
    jax.eval_shape(jax.checkpoint(net.step(way)), *net.args)


def restored(net, way):
    jitted(net, way)
    eager(net, way, pickle.loads(pickle.dumps(net.args)))


def cells(net, way):
    """A cell that runs again, after a look at the shapes."""
    for _ in range(2):
        jax.eval_shape(net.tx.init, net.args[0])
        jax.make_jaxpr(net.step(way))(*net.args)


TRACED = [jitted, checkpoint, scan, fori_loop, vmap, shard_map]
PLACES = [*TRACED, eager]


# Parts: right programs whose objects differ between loss and update, and others.


def halves(net, way):
    """In a sweep, where the function that makes the gradients is kept."""
    gradient = apart(way)
    for _ in range(2):
        (params, state, x), update = net.args, jax.jit(net.apply)
        for _ in range(2):
            grads, state = jax.eval_shape(gradient, params, state, x)
            params, state = jax.eval_shape(update, params, state, grads)


def inner_jit(net, way):
    gradient = apart(way)
    for _ in range(2):
        jitted(net, gradient)


def unscaled_in_jit(net, way, read=lambda state: state):
    unscale = jax.jit(lambda *args: ls.unscale_grads(*args))
    eager(net, lambda p, s, x: unscale(scaled(p, s, x), read(s)), times=2)


def unscaled_in_jit_by_the_scale_alone(net, way):
    unscaled_in_jit(net, way, ls.get_loss_scale_state)


def in_zero(net, way):
    """The state is sharded, and gradients are made in `shard_map`."""
    specs = dict.fromkeys(net.args[0], P())
    states = optax.tree.map_params(
        *(net.tx, lambda _, spec: spec, net.args[1], specs),
        transform_non_params=lambda _: P(),
    )
    jitted(net, on_mesh(true, (specs, states, P()), P()))


def trainer_at_a_number(net, way):
    gradient = apart(lambda p, s, x: by_trainer(p, 8.0, x))
    eager(net, gradient, times=2)


def two_models_at_scales_alone(net, way):
    """Both gradients come before both updates."""
    for way, read in ((by_trainer, ls.get_loss_scale), (true, ls.get_loss_scale_state)):
        gradient, nets = apart(way), [Net(), Net(width=3)]
        args = [(params, read(state), x) for params, state, x in (n.args for n in nets)]
        all_grads = [gradient(*a)[0] for a in args]
        for n, grads in zip(nets, all_grads, strict=True):
            n.apply(*n.args[:2], grads)


def beside_a_fixed_scale(net, way):
    """The update of the other optimizer does not use up the scale."""
    params, state, x = net.args
    grads, _ = apart(true)(params, state.scale_state, x)
    eager(Net(rule=ls.FixedLossScale(1.0)), unscaled)
    net.apply(params, state, grads)


def at_scale_1(net, way):
    jitted(Net(rule=ls.FixedLossScale(1.0)), unscaled)


def beside_one_scale(net, way):
    """One scale for several optimizers, which only skip."""
    rule, skips = ls.DynamicLossScale(), Net(rule=ls.FixedLossScale(1.0))

    def step(scale_state, params, state, x):
        grads = true(params, scale_state, x)
        scale_state = rule.update(scale_state, ls.all_finite(grads))
        return skips.apply(params, state, grads), scale_state

    jax.eval_shape(step, rule.init(), *skips.args)


def two_models(net, way):
    """As in a GAN: both losses, then both updates."""

    def step(params, state, x):
        other_state = net.tx.init(params)
        grads, state = gradients(way, params, state, x)
        other = net.apply(params, other_state, true(params, other_state, x))
        return net.apply(params, state, grads), other

    jax.eval_shape(step, *net.args)


def two_optimizers(net, way):
    """One loss, whose gradients go to optimizers with scales of their own."""
    other = ls.with_loss_scaling(optax.sgd(0.1))

    def step(other_state, params, state, x):
        grads = true(params, state, x)
        updates = other.update(grads["w"], other_state, params["w"])
        return net.apply(params, state, grads), updates

    jax.eval_shape(step, other.init(net.args[2]), *net.args)


def one_step_late(net, way):
    """As in pipelines: the gradients of a step are applied in the next one."""
    params, state, x = net.args
    late, _ = gradients(way, *net.args)
    for _ in range(2):
        grads, _ = gradients(way, params, state, x)
        params, state = net.apply(params, state, late)
        late = grads


def for_two_steps(net, way):
    """The same gradients are applied twice."""
    grads, _ = apart(way)(*net.args)
    eager(net, lambda *args: grads, times=2)


def eager_scan(net, way):
    """Each call traces anew: the scale is a constant of each, and none is wrong."""
    eager(net, summed, times=2)


def with_an_integer(net, way):
    count = jax.device_put(np.int32(3))

    def with_count(params, state, x):
        grads = {**scaled(params, state, x), "count": count}
        return {name: ls.unscale_grads(grads, state)[name] for name in params}

    eager(net, with_count, times=2)


def train_state(net, way):
    def step(state, x):
        return state.apply_gradients(grads=true(state.params, state, x))

    params, _, x = net.args
    jax.eval_shape(step, TrainState.create(apply_fn=None, params=params, tx=net.tx), x)


def nnx_optimizer(net, way, make=ls.value_and_grad):
    @nnx.jit
    def step(model, optimizer, x):
        fun = make(lambda m: m(x).sum(), optimizer, value_and_grad=nnx.value_and_grad)
        optimizer.update(model, fun(model)[1])

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    # That of Flax 0.11 takes no master weights.
    step(model, nnx.Optimizer(model, Net().tx, wrt=nnx.Param), np.ones(2, np.float32))


def nnx_retries(net, way):
    nnx_optimizer(net, way, ls.value_and_grad_with_retries)


PARTS = [halves, inner_jit, unscaled_in_jit, unscaled_in_jit_by_the_scale_alone]
PARTS += [in_zero, trainer_at_a_number, two_models_at_scales_alone]
PARTS += [beside_a_fixed_scale, at_scale_1, beside_one_scale, two_models]
PARTS += [two_optimizers, one_step_late, for_two_steps, eager_scan, with_an_integer]
PARTS += [train_state, nnx_optimizer, nnx_retries]


def told(program, net, way):
    """All warnings, but that master weights are copies of parameters in float32."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program(net, way)
    return [str(w.message) for w in seen if "float32 copies" not in str(w.message)]


def assert_told(message, *program):
    [text] = told(*program)
    assert text.startswith(message)


NET = Net()  # of all tables: a new process has no notes of its state
OTHERS = {"optimizer": Net("master"), "names": Net(names=("kernel", "bias"))}


@pytest.mark.parametrize("place", [*PLACES, restored, cells])
@pytest.mark.parametrize("way", RIGHT)
def test_right_step_is_silent(way, place):
    assert told(place, NET, RIGHT[way]) == []


@pytest.mark.parametrize("part", PARTS)
def test_right_program_in_parts_is_silent(part):
    assert told(part, NET, true) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WRONG)
def test_wrong_step_is_told_once_and_no_right_one_after_it(way, place):
    way, message = WRONG[way]
    assert_told(message, place, NET, way)
    assert told(place, NET, true) == []


@pytest.mark.parametrize("other", OTHERS)
def test_right_model_hides_no_wrong_one_of_another_structure(other):
    for program in (halves, unscaled_in_jit):
        assert told(program, OTHERS[other], true) == []
    assert_told(FORGOTTEN, jitted, NET, unscaled)
    assert_told(NOT_DIVIDED, jitted, NET, scaled)


def closed_over(way, state):
    """A gradient function that was built once holds the first scale."""
    return lambda params, _, x: gradients(way, params, state, x)[0]


@pytest.mark.parametrize("place", TRACED)
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_constant_scale_is_told_where_a_traced_update_reads_another(way, place):
    assert_told(CONSTANT, place, NET, closed_over(way, NET.args[1]))
    # That of a fixed rule is right.
    assert told(place, NET, closed_over(way, ls.FixedLossScale().init())) == []


def eager_vmap(net, way):
    vmap(net, way, run=lambda f, *args: f(*args))


def eager_jvp(net, way):
    def step(params, scale):
        scale_state = state.scale_state._replace(loss_scale=scale)
        return net.step(way)(params, state._replace(scale_state=scale_state), x)[0]

    params, state, x = net.args
    primals = params, state.scale_state.loss_scale
    jax.jvp(step, primals, primals)


@pytest.mark.parametrize("place", [eager, eager_vmap, eager_jvp])
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_constant_scale_is_right_in_eager_programs(way, place):
    """They read it each time, also where they map or differentiate."""
    assert told(place, NET, closed_over(way, NET.args[1])) == []


def test_static_data_of_a_model_is_freed():
    """Of an eager step. JAX itself keeps that of a compiled one."""

    def run():
        tx = ls.with_loss_scaling(optax.sgd(0.1, momentum=0.9))
        params = jax.tree_util.Partial(lambda w: w, NET.args[2])
        state = tx.init(params)
        grads = ls.grad(lambda params: params().sum(), state)(params)
        tx.update(grads, state, params)
        return weakref.ref(params.func)

    static = run()
    gc.collect()
    assert static() is None


def test_threads_do_not_disturb_each_other():
    """They share one state, whose notes all of them write."""

    def train(net, way):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: eager(net, way, times=5), range(8)))

    assert told(train, Net(width=4), by_hand) == []


@dataclasses.dataclass(frozen=True)
class Program:
    """A step or parts, which train a new network. It draws and prints itself."""

    run: Any
    way: str
    optimizer: str
    width: int

    @classmethod
    def draw(cls, rng, *tables):
        return cls(*(rng.choice([*table]) for table in (*tables, OPTIMIZERS, (2, 3))))

    def told(self, way):
        return told(self.run, Net(self.optimizer, self.width), way)


@pytest.mark.parametrize("seed", slow_but(range(15), range(65)))
def test_random_right_programs_follow_a_wrong_one(seed):
    """It comes first: after a right one, its gradients might be those of any other."""
    rng = random.Random(seed)
    wrong = Program.draw(rng, PLACES, WRONG)
    runs = [*PLACES, restored, cells] if rng.random() < 0.4 else PARTS
    right = [Program.draw(rng, runs, RIGHT) for _ in range(rng.randint(1, 4))]
    with noted(seed, wrong, *right):
        way, message = WRONG[wrong.way]
        [text] = wrong.told(way)
        assert text.startswith(message)
        for program in right:
            assert (program, program.told(RIGHT[program.way])) == (program, [])
