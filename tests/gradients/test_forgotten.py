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
from jax.sharding import PartitionSpec
from meshes import on_mesh
from shared import slow_but

import optax_lossscale as ls

pytestmark = pytest.mark.usefixtures("new_process")
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
MASTERS = ls.with_master_weights(optax.sgd(0.1, momentum=0.9))


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


NET, UNSCALED = Net(), Net(rule=ls.FixedLossScale(1.0))


# Ways to compute gradients from parameters, a state and a batch.


def unscaled(params, state, x):
    return jax.grad(loss_fn)(params, x)


def scaled(params, state, x):
    return jax.grad(lambda p: ls.scale_loss(loss_fn(p, x), state))(params)


def scaled_twice(params, state, x):
    return ls.grad(lambda p: ls.scale_loss(loss_fn(p, x), state), state)(params)


def true(params, state, x):
    return ls.grad(loss_fn, state)(params, x)


def by_hand(params, state, x):
    return ls.unscale_grads(scaled(params, state, x), state)


def by_getter(params, state, x):
    grads = jax.grad(lambda p: ls.get_loss_scale(state) * loss_fn(p, x))(params)
    return ls.unscale_grads(grads, state)


def retried(params, state, x):
    return ls.value_and_grad_with_retries(loss_fn, state)(params, x)[1]


def trainer(params, state, x):
    return jax.grad(ls.scale_backward(loss_fn, state))(params, x)


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


def with_an_integer(params, state, x, count=np.array(3)):  # noqa: B008
    """The integer stays the same array."""
    grads = ls.unscale_grads({**scaled(params, state, x), "count": count}, state)
    return {name: grads[name] for name in params}


def after_an_error(params, state, x):
    """A loss that raises is not scaled."""
    for make in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            make(lambda params: 1 // 0, state)(params)
    return unscaled(params, state, x)


def by_name(*functions):
    return {x.__name__: x for x in functions}


RIGHT = {
    **by_name(true, by_hand, by_getter, retried, trainer),
    **by_name(summed, penalized, meta_learned, with_an_integer),
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
    "scaled twice": (scaled_twice, "The loss is scaled twice"),
}
for way in (true, retried, by_hand, by_getter):
    WRONG[f"{way.__name__}, divided twice"] = (
        lambda p, s, x, way=way: ls.unscale_grads(way(p, s, x), s),
        "The gradients are divided by the loss scale twice",
    )

# Places where a step runs.

AROUND = {
    "jit": lambda f: f,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda *a: jax.lax.scan(lambda a, _: (f(*a), 0), a, length=2),
    "vmap": lambda f: (
        lambda *a: jax.vmap(f)(*jax.tree.map(lambda x: jnp.stack([x, x]), a))
    ),
    "shard_map": lambda f: on_mesh(f, PartitionSpec(), PartitionSpec()),
}


def traced(step, args, around="jit"):
    jax.eval_shape(AROUND[around](step), *args)


def eager(step, args, times=1):
    for _ in range(times):
        args = step(*args)


def host(step, args):
    eager(step, jax.device_get(args))


def restored(step, args):
    traced(step, args)
    eager(step, pickle.loads(pickle.dumps(args)))


def cells(step, args):
    """A notebook's cell runs twice."""
    for _ in range(2):
        jax.make_jaxpr(step)(*args)


TRACED = {name: functools.partial(traced, around=name) for name in AROUND}
PLACES = {**TRACED, **by_name(eager, host)}


# Right programs in which the loss and the update see different objects, and others.


def apart(function):
    """Compile a function anew, apart from the rest of the step."""
    return jax.jit(lambda *args: function(*args))


def closed_over(way, state):
    """A gradient function that was built once holds the first scale."""
    return lambda params, _, x: way(params, state, x)


def in_parts(net, way, parts, read=lambda state: state):
    """Two steps, some parts compiled apart. The gradient may get the scale alone."""
    functions = {"init": net.tx.init, "gradient": way, "update": net.apply}
    init, gradient, update = (
        apart(function) if name in parts else function
        for name, function in functions.items()
    )
    params, _, x = net.args
    state = init(params)
    for _ in range(2):
        grads = gradient(params, read(state), x)
        eager(UNSCALED.step(unscaled), UNSCALED.args)
        params, state = update(params, state, grads)


def unscaled_apart(net, way=None, read=lambda state: state):
    unscale = apart(ls.unscale_grads)
    step = net.step(lambda p, s, x: unscale(scaled(p, s, x), read(s)))
    eager(step, net.args, times=2)


def fixed_scale(net, way):
    """The gradient function has a state of its own, with the same scale."""
    net = Net(rule=ls.FixedLossScale(8.0))
    in_parts(net, closed_over(way, net.args[1]), "gradient, update")


def two_networks(net, way):
    """A GAN computes all gradients, then all updates."""
    other = Net()

    def step(*args):
        pairs = [*zip((net, other), args, strict=True)]
        grads = [way(*args) for _, args in pairs]
        return [n.apply(*a[:2], g) for (n, a), g in zip(pairs, grads, strict=True)]

    jax.eval_shape(step, net.args, other.args)


def one_step_late(net, way):
    """A pipeline applies the gradients of a step in the next one."""
    step = jax.jit(lambda p, s, x, grads: (*net.apply(p, s, grads), way(p, s, x)))
    jax.eval_shape(step, *net.args, way(*net.args))


def closed_over_whole(net, way):
    """The scale of the update is the same constant."""
    params, state, x = net.args
    jax.eval_shape(lambda p: net.apply(p, state, way(p, state, x)), params)


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
    step(model, nnx.Optimizer(model, NET.tx, wrt=nnx.Param))


ALONE = ls.get_loss_scale_state
PROGRAMS = {
    **by_name(unscaled_apart, fixed_scale),
    **by_name(two_networks, one_step_late, closed_over_whole),
    "gradient apart": lambda *a: in_parts(*a, "gradient"),
    "gradient, update apart": lambda *a: in_parts(*a, "gradient, update"),
    "gradient apart, scale alone": lambda *a: in_parts(*a, "gradient", ALONE),
    "update apart, scale alone": lambda *a: in_parts(*a, "update", ALONE),
    "init, update apart": lambda *a: in_parts(*a, "init, update", ALONE),
    "number": lambda net, _: in_parts(net, trainer, "gradient", ls.get_loss_scale),
    "unscaled apart, scale alone": lambda net, _: unscaled_apart(net, read=ALONE),
    # Gradients are made in `shard_map`. Optax cannot shard master weights.
    "zero": lambda *_: traced(NET.step(AROUND["shard_map"](true)), NET.args),
    "nnx": lambda net, way: nnx_optimizer(),
    "nnx retries": lambda net, _: nnx_optimizer(ls.value_and_grad_with_retries),
    "nnx halves": lambda net, _: nnx_optimizer(outer=lambda f: f, inner=nnx.jit),
    "inner jit": lambda net, way: cells(net.step(apart(way)), net.args),
    # Each call traces anew, with its own scale as a constant.
    "eager scan": lambda net, way: eager(net.step(summed), net.args, times=2),
    "scale 1": lambda *_: traced(UNSCALED.step(unscaled), UNSCALED.args),
}
PLACED = {
    name: lambda net, way, place=place: place(net.step(way), net.args)
    for name, place in {**PLACES, **by_name(restored, cells)}.items()
}


def warnings_of(program, *args):
    """The warnings of a program, without that of the copies in float32."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program(*args)
    return [str(w.message) for w in seen if "float32 copies" not in str(w.message)]


def assert_warns(program, net, way, message):
    [text] = warnings_of(PLACED[program], net, way)
    assert text.startswith(message)


CELLS = [*itertools.product(RIGHT, PLACED), *itertools.product(["true"], PROGRAMS)]
QUICK = [x for x in CELLS if {"by_hand", "retried", "jit", "eager", *PROGRAMS} & {*x}]


@pytest.mark.parametrize("cell", slow_but(QUICK, CELLS), ids=" ".join)
def test_right_program_never_warns(cell):
    way, program = cell
    assert warnings_of((PLACED | PROGRAMS)[program], NET, RIGHT[way]) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WRONG)
def test_wrong_step_warns_once_and_a_right_one_after_it_never(way, place):
    assert_warns(place, NET, *WRONG[way])
    assert warnings_of(PLACED[place], NET, true) == []


@pytest.mark.parametrize("place", PLACES)
def test_right_step_hides_no_forgotten_unscale(place):
    assert warnings_of(PLACED[place], NET, by_hand) == []
    assert_warns("jit", NET, *WRONG["scaled"])


@pytest.mark.parametrize("seed", slow_but(range(10), range(40)))
def test_right_programs_after_a_wrong_step_never_warn(seed):
    """After a right program, gradients of unknown origin might be its gradients."""
    rng = random.Random(seed)
    optimizers = ADAM, SGD, CLIPPED, MASTERS
    place, wrong = rng.choice([*PLACES]), rng.choice([*WRONG])
    assert_warns(place, Net(rng.choice(optimizers)), *WRONG[wrong])
    for _ in range(rng.randint(1, 4)):
        name, way = rng.choice([*PLACED, *PROGRAMS]), rng.choice([*RIGHT])
        net = Net(rng.choice(optimizers), rng.choice([2, 3]))
        texts = warnings_of((PLACED | PROGRAMS)[name], net, RIGHT[way])
        assert texts == [], (place, wrong, name, way)


# The structure of a right program, and another one, of a wrong step.
STRUCTURES = {
    "moments": (Net(MASTERS), NET),
    "names": (Net(names=("kernel", "bias")), NET),
    "no arrays": (Net(CLIPPED), Net(SGD)),
}


@pytest.mark.parametrize(("right", "wrong"), STRUCTURES.values(), ids=STRUCTURES)
def test_right_program_hides_no_wrong_step_of_another_structure(right, wrong):
    for program in ("gradient, update apart", "unscaled_apart"):
        assert warnings_of(PROGRAMS[program], right, true) == []
    assert_warns("jit", wrong, *WRONG["unscaled"])
    assert_warns("jit", wrong, *WRONG["scaled"])


def test_unscaling_after_the_update_warns_in_each_step():
    """It gets the scale of the next step, which it must not count as unscaled."""

    def late(params, state, x):
        params, state = NET.apply(params, state, scaled(params, state, x))
        return ls.unscale_grads(params, state), state, x

    texts = warnings_of(functools.partial(eager, times=3), late, NET.args)
    assert [x[: len(LEFT_ON)] for x in texts] == 3 * [LEFT_ON]
    [text] = warnings_of(traced, late, NET.args)
    assert text.startswith(LEFT_ON)


@pytest.mark.parametrize("place", TRACED)
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_traced_update_warns_of_a_constant_scale(way, place):
    message = "The loss scale, 32768, is a constant of a compiled function"
    assert_warns(place, NET, closed_over(way, NET.args[1]), message)
    fixed = closed_over(way, ls.FixedLossScale().init())
    assert warnings_of(PLACED[place], NET, fixed) == []


def by_scale(step):
    """Differentiate the next loss with respect to the scale."""
    return jax.grad(lambda *a: loss_fn(*step(*a)[::2]), argnums=1, allow_int=True)


@pytest.mark.parametrize("around", [lambda f: f, AROUND["vmap"], by_scale])
@pytest.mark.parametrize("way", [true, retried, by_hand])
def test_eager_update_never_warns_of_a_constant_scale(way, around):
    """It reads the scale each time, even where it is mapped or differentiated."""
    step = around(NET.step(closed_over(way, NET.args[1])))
    assert warnings_of(step, *NET.args) == []


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
    def train(net):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            step = net.step(by_hand)
            list(pool.map(lambda _: eager(step, net.args, times=5), range(8)))

    assert warnings_of(train, Net(width=4)) == []
