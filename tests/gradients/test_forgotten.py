"""A wrong train step warns once, at its first step; a right one never does.

Ways to compute gradients, right and wrong, are crossed with places where a step runs.
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


class LateNet(Net):
    """It unscales after `update`."""

    def apply(self, params, state, grads):
        params, state = super().apply(params, state, grads)
        return ls.unscale_grads(params, state), state


NET = Net()
COUNT = np.array(3)


# Ways to compute gradients from parameters, a state and a batch.


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


def retried(params, state, x):
    return ls.value_and_grad_with_retries(loss_fn, state)(params, x)[1]


def summed(params, state, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, true(params, state, x)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, jnp.stack([x, x]))[0]


def penalized(params, state, x):
    """PyTorch's recipe scales and unscales an inner gradient."""

    def loss(params):
        slope = by_hand(params, state, x)
        return loss_fn(params, x) + optax.tree.norm(slope, squared=True)

    return ls.grad(loss, state)(params)


def meta_learned(params, state, x):
    """The scaled loss contains a training loop with its own scale."""

    def outer_loss(params):
        inner = NET.tx.init(params)
        params, _ = NET.apply(params, inner, by_hand(params, inner, x))
        return loss_fn(params, x)

    return ls.grad(outer_loss, state)(params)


def with_an_integer(params, state, x):
    """The integer stays the same array."""
    grads = {**scaled(params, state, x), "count": COUNT}
    return {name: ls.unscale_grads(grads, state)[name] for name in params}


def after_an_error(params, state, x):
    """A loss that raises is not scaled."""
    for make in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            make(lambda params: 1 // 0, state)(params)
    return unscaled(params, state, x)


def by_name(*functions):
    return {x.__name__: x for x in functions}


RIGHT = {
    **by_name(true, by_hand, by_getter, retried),
    **by_name(summed, penalized, meta_learned, with_an_integer),
    "trainer": lambda p, s, x: jax.grad(ls.scale_backward(loss_fn, s))(p, x),
    "the scale alone": lambda p, s, x: true(p, ls.get_loss_scale_state(s), x),
    "two losses": lambda *args: jax.tree.map(jnp.add, true(*args), by_hand(*args)),
    # Nobody differentiates the scaled loss.
    "a log": lambda p, s, x: (ls.scale_loss(loss_fn(p, x), s), true(p, s, x))[1],
}
FORGOTTEN = "No loss has been scaled for this optimizer state"
LEFT_ON = "`scale_loss` has scaled a loss, but `unscale_grads` has"
WRONG = {
    "unscaled": (unscaled, FORGOTTEN),
    "after an error": (after_an_error, FORGOTTEN),
    "scaled": (scaled, LEFT_ON),
    "scaled twice": (
        lambda p, s, x: ls.grad(lambda p: ls.scale_loss(loss_fn(p, x), s), s)(p),
        "The loss is scaled twice",
    ),
}
for way in (true, retried, by_hand, by_getter):
    WRONG[f"{way.__name__}, divided twice"] = (
        lambda p, s, x, way=way: ls.unscale_grads(way(p, s, x), s),
        "The gradients are divided by the loss scale twice",
    )

# Places where a network and a way run.

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
    """A notebook's cell runs twice, each time after a look at the shapes."""
    for _ in range(2):
        jax.eval_shape(net.tx.init, net.args[0])
        jax.make_jaxpr(net.step(way))(*net.args)


TRACED = {name: functools.partial(traced, around=name) for name in AROUND}
PLACES = {**TRACED, **by_name(eager, host)}
RIGHT_PLACES = {**PLACES, **by_name(restored, cells)}


# Right programs in which the loss and the update see different objects, and others.


def apart(function):
    """Compile a function anew, apart from the rest of the step."""
    return jax.jit(lambda *args: function(*args))


def closed_over(way, state):
    """A gradient function that was built once holds the first scale."""
    return lambda params, _, x: way(params, state, x)


def in_parts(net, way, compiled, read=lambda state: state):
    """Two steps; some of their parts are traced apart, and may get the scale alone."""

    def part(name, function):
        traced = apart(function)

        def run(*args):
            shapes = jax.eval_shape(traced, *args)
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

        return run if name in compiled else function

    params, state, x = net.args
    if "init" in compiled:
        state = jax.jit(net.tx.init)(params)
    gradient, update = part("gradient", way), part("update", net.apply)
    unscale = part("unscale", ls.unscale_grads)
    for _ in range(2):
        if "unscale" in compiled:
            grads = unscale(scaled(params, state, x), read(state))
        else:
            grads = gradient(params, read(state), x)
        # Another optimizer updates between.
        eager(Net(rule=ls.FixedLossScale(1.0)), unscaled)
        new = update(params, state, grads)
        params, state = (params, state) if "update" in compiled else new


def state_of_retries(net, way):
    def step(params, state, x):
        _, grads, state = ls.value_and_grad_with_retries(loss_fn, state)(params, x)
        return net.apply(params, state, grads)

    step(*net.args)
    jax.eval_shape(step, *net.args)


def beside_others(net, way):
    """A GAN computes all gradients, then all updates. Two states share a structure."""
    other = Net(SGD, len(net.args[2]))

    def step(*args):
        params, _, x = other.args
        state = net.tx.init(params)
        grads, others = way(*args), way(params, state, x)
        other.apply(*other.args[:2], true(*args))
        net.apply(params, state, others)
        return net.apply(*args[:2], grads)

    jax.eval_shape(step, *net.args)


def fixed_scale(net, way):
    """The gradient function has a state of its own, with the same scale."""
    rule = ls.FixedLossScale(8.0)
    gradient = apart(closed_over(way, rule.init()))
    net = Net(rule=rule)
    jax.eval_shape(apart(net.apply), *net.args[:2], gradient(*net.args))


def one_step_late(net, way):
    """A pipeline applies the gradients of a step in the next one."""
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


def parts(compiled, read=lambda state: state):
    return functools.partial(in_parts, compiled=compiled, read=read)


unscaled_apart, halves = parts("unscale"), parts("gradient, update")
alone, number = ls.get_loss_scale_state, ls.get_loss_scale
PARTS = {
    **by_name(state_of_retries, beside_others, train_state, fixed_scale, one_step_late),
    "gradient apart": parts("gradient"),
    "unscale apart": unscaled_apart,
    "gradient and update apart": halves,
    "gradient apart, of the scale alone": parts("gradient", alone),
    "unscale apart, of the scale alone": parts("unscale", alone),
    "update apart, gradient of the scale alone": parts("update", alone),
    "init and update apart": parts("init, update", alone),
    "trainer of a number": lambda net, _: in_parts(
        net, RIGHT["trainer"], "gradient", number
    ),
    # Gradients are made in `shard_map`. Optax cannot shard master weights.
    "zero": lambda net, way: traced(Net(), AROUND["shard_map"](true)),
    "nnx": lambda net, way: nnx_optimizer(),
    "nnx retries": lambda net, _: nnx_optimizer(ls.value_and_grad_with_retries),
    "nnx halves": lambda net, _: nnx_optimizer(outer=lambda f: f, inner=nnx.jit),
    "inner jit": lambda net, way: [traced(net, f) for f in 2 * [apart(way)]],
    # Each call traces anew, with its own scale as a constant.
    "eager scan": lambda net, way: eager(net, summed, times=2),
    "scale 1": lambda net, way: traced(Net(rule=ls.FixedLossScale(1.0)), unscaled),
}
PROGRAMS = {**RIGHT_PLACES, **PARTS}


def warnings_of(program, net, way):
    """The warnings of a program, without that of the copies in float32."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program(net, way)
    return [str(w.message) for w in seen if "float32 copies" not in str(w.message)]


def assert_warns(program, net, way, message, times=1):
    texts = warnings_of(program, net, way)
    assert [x[: len(message)] for x in texts] == times * [message]


CELLS = [*itertools.product(RIGHT, RIGHT_PLACES), *itertools.product(["true"], PARTS)]
QUICK = [x for x in CELLS if {"by_hand", "retried", "jit", "eager", *PARTS} & {*x}]


@pytest.mark.parametrize("cell", slow_but(QUICK, CELLS), ids=" ".join)
def test_right_program_never_warns(cell):
    way, program = cell
    assert warnings_of(PROGRAMS[program], NET, RIGHT[way]) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WRONG)
def test_wrong_step_warns_once_and_a_right_one_after_it_never(way, place):
    assert_warns(PLACES[place], NET, *WRONG[way])
    assert warnings_of(PLACES[place], NET, true) == []


@pytest.mark.parametrize("seed", slow_but(range(10), range(40)))
def test_right_programs_after_a_wrong_step_never_warn(seed):
    """After a right program, gradients of unknown origin might be its gradients."""
    rng = random.Random(seed)
    place, wrong = rng.choice([*PLACES]), rng.choice([*WRONG])
    assert_warns(PLACES[place], Net(rng.choice(OPTIMIZERS)), *WRONG[wrong])
    for _ in range(rng.randint(1, 4)):
        name, way = rng.choice([*PROGRAMS, *PARTS]), rng.choice([*RIGHT])
        net = Net(rng.choice(OPTIMIZERS), rng.choice([2, 3]))
        texts = warnings_of(PROGRAMS[name], net, RIGHT[way])
        assert texts == [], (place, wrong, name, way)


# The structure of a right program, and another one, of a wrong step.
STRUCTURES = {
    "moments": (Net(MASTERS), NET),
    "names": (Net(names=("kernel", "bias")), NET),
    "no arrays": (Net(CLIPPED), Net(SGD)),
}


@pytest.mark.parametrize(("right", "wrong"), STRUCTURES.values(), ids=STRUCTURES)
def test_right_program_hides_no_wrong_step_of_another_structure(right, wrong):
    for program in (halves, unscaled_apart):
        assert warnings_of(program, right, true) == []
    assert_warns(traced, wrong, *WRONG["unscaled"])
    assert_warns(traced, wrong, *WRONG["scaled"])


@pytest.mark.parametrize("place", PLACES)
def test_earlier_step_hides_no_forgotten_unscale(place):
    late = LateNet()
    assert_warns(PLACES[place], late, *WRONG["scaled"])
    # Each step has the scale that the one before has passed to `unscale_grads`.
    assert_warns(functools.partial(eager, times=3), late, *WRONG["scaled"], times=3)
    assert warnings_of(PLACES[place], NET, by_hand) == []
    assert_warns(traced, NET, *WRONG["scaled"])


@pytest.mark.parametrize("place", TRACED)
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_traced_update_warns_of_a_constant_scale(way, place):
    message = "The loss scale, 32768, is a constant of a compiled function"
    assert_warns(TRACED[place], NET, closed_over(way, NET.args[1]), message)
    fixed = closed_over(way, ls.FixedLossScale().init())
    assert warnings_of(TRACED[place], NET, fixed) == []


def by_scale(step):
    """Differentiate the next loss with respect to the scale."""
    return jax.grad(lambda *a: loss_fn(*step(*a)[::2]), argnums=1, allow_int=True)


AROUND_EAGER = {"eager": lambda f: f, "vmap": AROUND["vmap"], "by_scale": by_scale}


@pytest.mark.parametrize("around", AROUND_EAGER.values(), ids=AROUND_EAGER)
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_eager_update_never_warns_of_a_constant_scale(way, around):
    """It reads the scale each time, even where it is mapped or differentiated."""
    step = around(NET.step(closed_over(way, NET.args[1])))
    assert warnings_of(lambda *_: step(*NET.args), NET, way) == []


def test_notes_keep_no_arrays_and_no_static_data():
    """The step is eager, because JAX keeps the static data of a compiled one."""

    def run(tx, static):
        params = jax.tree_util.Partial(static, np.ones(2, np.float32))
        state = tx.init(params)
        grads = ls.grad(lambda p: p().sum(), state)(params)
        updates, new_state = tx.update(grads, state, params)
        scales = [x.scale_state.loss_scale for x in (state, new_state)]
        alive = static, *jax.tree.leaves((grads, updates)), *scales
        return [weakref.ref(x) for x in alive]

    refs = run(ls.with_loss_scaling(optax.sgd(0.1, momentum=0.9)), lambda w: w)
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_threads_with_one_state_do_not_warn():
    def train(net, way):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: eager(net, way, times=5), range(8)))

    assert warnings_of(train, Net(width=4), by_hand) == []
