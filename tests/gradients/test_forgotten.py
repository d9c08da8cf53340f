"""A wrong train step is told at its first step; right ones are silent.

Ways to make gradients, right and wrong, are crossed with the places where a step runs.
All but eager steps are only traced.
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
from jax.sharding import PartitionSpec
from meshes import on_mesh
from shared import slow_but

import optax_lossscale as ls

pytestmark = pytest.mark.usefixtures("new_process")
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
MASTERS = ls.with_master_weights(optax.sgd(0.1, momentum=0.9))
OPTIMIZERS = [ADAM, SGD, CLIPPED, MASTERS]


@jax.jit
def loss_fn(params, x):
    b, w = jax.tree.leaves(params)
    return jnp.mean((x * w + b) ** 2)


class Net:
    """Parameters, and all that trains them."""

    def __init__(self, inner=ADAM, width=2, names="wb", rule=None):
        self.tx = ls.with_loss_scaling(inner, rule or ls.DynamicLossScale())
        x = np.ones(width, np.float32)
        params = dict.fromkeys(names, x)
        self.args = params, self.tx.init(params), x

    def apply(self, params, state, grads):
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(self, way):
        """A function of parameters, state and batch that returns the next ones."""
        return lambda p, s, x: (*self.apply(p, s, way(p, s, x)), x)


NET = Net()  # of all tables: a new process has no notes of its state
COUNT = np.array(3)


# Ways to make gradients, of parameters, a state and a batch.


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
    return ls.value_and_grad_with_retries(loss_fn, state)(params, x)[1]


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
        inner = NET.tx.init(params)
        params, _ = NET.apply(params, inner, by_hand(params, inner, x))
        return loss_fn(params, x)

    return ls.grad(outer_loss, state)(params)


def with_an_integer(params, state, x):
    """Which stays the same array."""
    grads = {**scaled(params, state, x), "count": COUNT}
    return {name: ls.unscale_grads(grads, state)[name] for name in params}


def scaled_twice(params, state, x):
    return ls.grad(lambda p: ls.scale_loss(loss_fn(p, x), state), state)(params)


def after_an_error(params, state, x):
    """A loss that raised is not scaled."""
    for make in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            make(lambda params: 1 // 0, state)(params)
    return unscaled(params, state, x)


def by_name(*functions):
    return {x.__name__: x for x in functions}


RIGHT = {
    **by_name(true, by_hand, by_getter, by_trainer, retried),
    **by_name(summed, penalized, meta_learned, with_an_integer),
    "the scale alone": lambda p, s, x: true(p, ls.get_loss_scale_state(s), x),
    "two losses": lambda *args: jax.tree.map(jnp.add, true(*args), by_hand(*args)),
    # What is logged is the scaled loss, which nobody differentiates.
    "a log": lambda p, s, x: (ls.scale_loss(loss_fn(p, x), s), true(p, s, x))[1],
}
FORGOTTEN = "No loss has been scaled for this optimizer state"
LEFT_ON = "`scale_loss` has scaled a loss, but `unscale_grads` has"
WRONG = {
    "unscaled": (unscaled, FORGOTTEN),
    "after an error": (after_an_error, FORGOTTEN),
    "scaled": (scaled, LEFT_ON),
    "scaled twice": (scaled_twice, "The loss is scaled twice"),
}
for way in (true, retried, by_hand, by_getter):
    WRONG[f"{way.__name__}, divided twice"] = (
        lambda p, s, x, way=way: ls.unscale_grads(way(p, s, x), s),
        "The gradients are divided by the loss scale twice",
    )

# Programs of a network and a way. Most places are traced.

AROUND = {
    "jit": lambda f: f,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda *a: jax.lax.scan(lambda a, _: (f(*a), 0), a, length=2),
    "fori_loop": lambda f: lambda *a: jax.lax.fori_loop(0, 2, lambda _, a: f(*a), a),
    "vmap": lambda f: (
        lambda *a: jax.vmap(f)(*jax.tree.map(lambda x: jnp.stack([x, x]), a))
    ),
    "shard_map": lambda f: on_mesh(f, PartitionSpec(), PartitionSpec()),
}


def traced(net, way, around="jit"):
    jax.eval_shape(AROUND[around](net.step(way)), *net.args)


def eager(net, way, args=None, times=1):
    args = args or net.args
    for _ in range(times):
        args = net.step(way)(*args)


def host(net, way):
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
PLACES = {**TRACED, **by_name(eager, host)}
RIGHT_PLACES = {**PLACES, **by_name(restored, cells)}


# Right programs in parts, whose objects differ between loss and update, and others.


def apart(way):
    """As a compiled function of its own."""
    return jax.jit(lambda *args: way(*args))


def halves(net, way):
    """In a sweep, where the function that makes the gradients is kept."""
    gradient = apart(way)
    for _ in range(2):
        grads = jax.eval_shape(gradient, *net.args)
        jax.eval_shape(apart(net.apply), *net.args[:2], grads)


def unscaled_apart(net, way=None, read=lambda state: state):
    unscale = apart(ls.unscale_grads)
    eager(net, lambda p, s, x: unscale(scaled(p, s, x), read(s)), times=2)


def state_of_retries(net, way):
    def step(params, state, x):
        _, grads, state = ls.value_and_grad_with_retries(loss_fn, state)(params, x)
        return net.apply(params, state, grads)

    step(*net.args)
    jax.eval_shape(step, *net.args)


def beside_others(net, way):
    """As in a GAN: all gradients, then all updates. Two optimizers share some."""
    other = Net(SGD, len(net.args[2]))

    def step(*args):
        params, _, x = other.args
        state = net.tx.init(params)
        grads, others = way(*args), way(params, state, x)
        other.apply(*other.args[:2], true(*args))
        net.apply(params, state, others)
        return net.apply(*args[:2], grads)

    jax.eval_shape(step, *net.args)


def at_a_scale_alone(net, way, read=ls.get_loss_scale_state):
    """The update of another optimizer does not use it up."""
    params, state, x = net.args
    grads = apart(way)(params, read(state), x)
    eager(Net(rule=ls.FixedLossScale(1.0)), unscaled)
    for _ in range(2):
        net.apply(params, state, grads)


def one_step_late(net, way):
    """As in pipelines: the gradients of a step are applied in the next one."""
    late = [way(*net.args)]

    def one_late(*args):
        late.append(way(*args))
        return late.pop(0)

    eager(net, one_late, times=2)


def train_state(net, way):
    def step(state, x):
        return state.apply_gradients(grads=true(state.params, state, x))

    params, _, x = net.args
    jax.eval_shape(step, TrainState.create(apply_fn=None, params=params, tx=net.tx), x)


def nnx_optimizer(make=ls.value_and_grad, outer=nnx.jit, inner=lambda f: f):
    @inner
    def gradient(model, optimizer):
        fun = make(lambda m: m(x).sum(), optimizer, value_and_grad=nnx.value_and_grad)
        return fun(model)[1]

    @outer
    def step(model, optimizer):
        inner(nnx.Optimizer.update)(optimizer, model, gradient(model, optimizer))

    x, model = np.ones(2, np.float32), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    # That of Flax 0.11 takes no master weights.
    step(model, nnx.Optimizer(model, Net().tx, wrt=nnx.Param))


PARTS = {
    **by_name(halves, unscaled_apart, state_of_retries, beside_others, train_state),
    **by_name(at_a_scale_alone, one_step_late),
    "unscaled alone": lambda net, _: unscaled_apart(net, read=ls.get_loss_scale_state),
    "a number": lambda net, _: at_a_scale_alone(net, by_trainer, ls.get_loss_scale),
    # Gradients are made in `shard_map`. Optax cannot shard master weights.
    "zero": lambda net, way: traced(Net(), AROUND["shard_map"](true)),
    "a compiled loss": lambda net, way: eager(net, apart(way), times=2),
    "nnx": lambda net, way: nnx_optimizer(),
    "nnx retries": lambda net, _: nnx_optimizer(ls.value_and_grad_with_retries),
    "nnx halves": lambda net, _: nnx_optimizer(outer=lambda f: f, inner=nnx.jit),
    "inner jit": lambda net, way: [traced(net, f) for f in 2 * [apart(way)]],
    # Each call traces anew: the scale is a constant of each, and none is wrong.
    "eager scan": lambda net, way: eager(net, summed, times=2),
    "scale 1": lambda net, way: traced(Net(rule=ls.FixedLossScale(1.0)), unscaled),
}
PROGRAMS = {**RIGHT_PLACES, **PARTS}


def told(program, net, way):
    """All warnings, but that master weights are copies of parameters in float32."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program(net, way)
    return [str(w.message) for w in seen if "float32 copies" not in str(w.message)]


def assert_told(program, net, way, message):
    [text] = told(program, net, way)
    assert text.startswith(message)


CELLS = [*itertools.product(RIGHT, RIGHT_PLACES), *itertools.product(["true"], PARTS)]
QUICK = [x for x in CELLS if {"by_hand", "retried", "jit", "eager", *PARTS} & {*x}]


@pytest.mark.parametrize("cell", slow_but(QUICK, CELLS), ids=" ".join)
def test_right_program_is_silent(cell):
    way, program = cell
    assert told(PROGRAMS[program], NET, RIGHT[way]) == []


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
    for _ in range(rng.randint(1, 4)):
        name, way = rng.choice([*PROGRAMS, *PARTS]), rng.choice([*RIGHT])
        net = Net(rng.choice(OPTIMIZERS), rng.choice([2, 3]))
        with noted(name, way):
            assert told(PROGRAMS[name], net, RIGHT[way]) == []


# A network, and one of which nothing follows for it.
OTHERS = {
    "moments": (NET, Net(MASTERS)),
    "names": (NET, Net(names=("kernel", "bias"))),
    "no arrays": (Net(SGD), Net(CLIPPED)),
}


@pytest.mark.parametrize(("net", "other"), OTHERS.values(), ids=OTHERS)
def test_right_model_hides_no_wrong_one_of_another_structure(net, other):
    for program in (halves, unscaled_apart):
        assert told(program, other, true) == []
    assert_told(traced, net, *WRONG["unscaled"])
    assert_told(traced, net, *WRONG["scaled"])


def closed_over(way, state):
    """A gradient function that was built once holds the first scale."""
    return lambda params, _, x: way(params, state, x)


@pytest.mark.parametrize("place", TRACED)
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_constant_scale_is_told_where_a_traced_update_reads_another(way, place):
    message = "The loss scale, 32768, is a constant of a compiled function"
    assert_told(TRACED[place], NET, closed_over(way, NET.args[1]), message)
    # That of a fixed rule is right.
    fixed = closed_over(way, ls.FixedLossScale().init())
    assert told(TRACED[place], NET, fixed) == []


def by_scale(step):
    """The derivative of the next loss by the scale."""
    return jax.grad(lambda *a: loss_fn(*step(*a)[::2]), argnums=1, allow_int=True)


@pytest.mark.parametrize("around", [AROUND["jit"], AROUND["vmap"], by_scale])
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


@pytest.mark.parametrize("place", PLACES)
def test_right_step_hides_no_forgotten_unscale(place):
    assert told(PLACES[place], NET, by_hand) == []
    assert_told(traced, NET, *WRONG["scaled"])
