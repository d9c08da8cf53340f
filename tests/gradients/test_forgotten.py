"""A wrong train step warns, when it is traced or runs eagerly; a right one never does.

A program runs a train step of a network, in which a way computes the gradients. Most
programs are only traced, because the warning comes while a step is traced.
"""

import concurrent.futures
import contextlib
import functools
import gc
import pickle
import random
import warnings
import weakref
from typing import NamedTuple

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
SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
MASTERS = ls.with_master_weights(MOMENTUM)


@jax.jit
def loss_fn(params, x):
    b, w = jax.tree.leaves(params)
    return jnp.mean((x * w + b) ** 2)


class Retried(NamedTuple):
    """The gradients of a step, and the state that the update gets."""

    grads: dict
    state: ls.WithLossScalingState


class Net:
    """Parameters, and all that trains them."""

    def __init__(self, inner=MOMENTUM, names=("w", "b"), rule=None):
        self.tx = ls.with_loss_scaling(inner, rule or ls.DynamicLossScale())
        x = np.ones(2, np.float32)
        params = dict.fromkeys(names, x)
        self.args = params, self.tx.init(params), x

    def apply(self, params, state, grads):
        if isinstance(grads, Retried):
            grads, state = grads
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(self, way):
        """A function of parameters, state and batch that returns the next ones."""
        return lambda p, s, x: (*self.apply(p, s, way(p, s, x)), x)


NET = Net()


# Right ways to compute gradients from parameters, a state and a batch.


def by_grad(params, state, x):
    return ls.grad(loss_fn, state)(params, x)


def by_hand(params, state, x):
    return ls.unscale_grads(scaled(params, state, x), state)


def by_getter(params, state, x):
    grads = jax.grad(lambda p: ls.get_loss_scale(state) * loss_fn(p, x))(params)
    return ls.unscale_grads(grads, state)


def by_retries(params, state, x):
    return Retried(*ls.value_and_grad_with_retries(loss_fn, state)(params, x)[1:])


def by_no_retries(params, state, x):
    return ls.value_and_grad_with_retries(loss_fn, state, max_retries=0)(params, x)[1]


def by_backward(params, state, x):
    return jax.grad(ls.scale_backward(loss_fn, state))(params, x)


def by_scale_alone(params, state, x):
    return by_grad(params, ls.get_loss_scale_state(state), x)


def of_two_losses(*args):
    return jax.tree.map(jnp.add, by_grad(*args), by_hand(*args))


def with_a_log_of_the_scaled_loss(params, state, x):
    ls.scale_loss(loss_fn(params, x), state)
    return by_grad(params, state, x)


def summed_in_a_scan(params, state, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, by_grad(params, state, x)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, jnp.stack([x, x]))[0]


def with_a_gradient_penalty(params, state, x):
    """PyTorch's recipe scales and unscales an inner gradient."""

    def loss(params):
        slope = by_hand(params, state, x)
        return loss_fn(params, x) + optax.tree.norm(slope, squared=True)

    return ls.grad(loss, state)(params)


def through_an_inner_training(params, state, x):
    """Meta-learning: the loss contains a training step with its own scale."""

    def outer_loss(params):
        inner = NET.tx.init(params)
        params, _ = NET.apply(params, inner, by_hand(params, inner, x))
        return loss_fn(params, x)

    return ls.grad(outer_loss, state)(params)


COUNT = np.array(3)


def with_an_integer(params, state, x):
    """The integer stays the same array, which has been divided in no step."""
    grads = ls.unscale_grads({**scaled(params, state, x), "count": COUNT}, state)
    return {name: grads[name] for name in params}


RIGHT = [
    *(by_grad, by_hand, by_getter, by_retries, by_no_retries, by_backward),
    by_scale_alone,
    *(of_two_losses, with_a_log_of_the_scaled_loss, summed_in_a_scan),
    *(with_a_gradient_penalty, through_an_inner_training, with_an_integer),
]
QUICK = [by_hand, by_retries, summed_in_a_scan]

# Wrong ways.


def unscaled(params, state, x):
    return jax.grad(loss_fn)(params, x)


def unscaled_after_an_error(params, state, x):
    """A loss that raises is not scaled."""
    for make in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            make(lambda params: 1 // 0, state)(params)
    return unscaled(params, state, x)


def scaled(params, state, x):
    return jax.grad(lambda p: ls.scale_loss(loss_fn(p, x), state))(params)


def scaled_twice(params, state, x):
    return ls.grad(lambda p: ls.scale_loss(loss_fn(p, x), state), state)(params)


def without_the_state_of_retries(params, state, x):
    return by_retries(params, state, x).grads


def divided_twice(params, state, x, way=by_hand):
    return ls.unscale_grads(way(params, state, x), state)


LEFT_SCALED = "`scale_loss` has scaled a loss, but `unscale_grads` has"
DIVIDED_TWICE = "The gradients are divided by the loss scale twice"
# The warning of each.
WRONG = {
    unscaled: "No loss has been scaled for this optimizer state",
    unscaled_after_an_error: "No loss has been scaled for this optimizer state",
    scaled: LEFT_SCALED,
    scaled_twice: "The loss is scaled twice",
    divided_twice: DIVIDED_TWICE,
    without_the_state_of_retries: "`update` gets the state that `value_and_grad_with",
}

# Programs that run a step of a network.


def jit(net, way):
    jax.eval_shape(net.step(way), *net.args)


def checkpoint(net, way):
    jax.eval_shape(jax.checkpoint(net.step(way)), *net.args)


def scan(net, way):
    def body(args, _):
        return net.step(way)(*args), None

    jax.eval_shape(lambda *args: jax.lax.scan(body, args, length=2), *net.args)


def vmap(net, way):
    pairs = jax.tree.map(lambda x: np.stack([x, x]), net.args)
    jax.eval_shape(jax.vmap(net.step(way)), *pairs)


def shard_map(net, way):
    step = on_mesh(net.step(way), PartitionSpec(), PartitionSpec())
    jax.eval_shape(step, *net.args)


def eager(net, way):
    net.step(way)(*net.args)


def eager_on_numpy(net, way):
    net.step(way)(*jax.device_get(net.args))


TRACED = [jit, checkpoint, scan, vmap, shard_map]
PLACES = [*TRACED, eager, eager_on_numpy]

# Programs that split, delay or repeat a right step.


def apart(function):
    """Compile a function anew, apart from the rest of the step."""
    return jax.jit(lambda *args: function(*args))


def in_parts(net, way, compiled="gradient, update", read=lambda state: state):
    """Two steps, some parts compiled apart. The gradient may get the scale alone."""
    init = apart(net.tx.init) if "init" in compiled else net.tx.init
    gradient = apart(way) if "gradient" in compiled else way
    update = apart(net.apply) if "update" in compiled else net.apply
    params, _, x = net.args
    state = init(params)
    for _ in range(2):
        grads = gradient(params, read(state), x)
        params, state = update(params, state, grads)


def unscaled_apart(net, way=None, read=lambda state: state):
    unscale = apart(ls.unscale_grads)
    step = net.step(lambda p, s, x: unscale(scaled(p, s, x), read(s)))
    step(*step(*net.args))


def closed_over(way, state):
    """A gradient function that was built once holds the first scale."""
    return lambda params, _, x: way(params, state, x)


def in_parts_at_a_fixed_scale(net, way):
    """The gradient function has a state of its own, with the same scale."""
    net = Net(rule=ls.FixedLossScale(8.0))
    in_parts(net, closed_over(way, net.args[1]))


def two_networks(net, way):
    """A GAN computes all gradients, then all updates."""
    other = Net()

    def step(*args):
        first, second = (way(*x) for x in args)
        return net.apply(*args[0][:2], first), other.apply(*args[1][:2], second)

    jax.eval_shape(step, net.args, other.args)


def one_gradient_of_two_networks(net, way):
    """One flag lowers both scales. The other optimizer has a state of its own."""
    other = Net(CLIPPED)

    def step(args, other_state):
        params, state, x = args
        grads = way(params, state, x)
        if isinstance(grads, Retried):
            grads, state = grads
        flag = {"grads_finite": ls.all_finite(grads)}
        pairs = (net.tx, state), (other.tx, other_state)
        return [tx.update(grads, state, params, **flag) for tx, state in pairs]

    jax.eval_shape(step, net.args, other.args[1])


def one_step_late(net, way):
    """A pipeline applies the gradients of a step in the next one."""
    step = jax.jit(lambda p, s, x, grads: (*net.apply(p, s, grads), way(p, s, x)))
    jax.eval_shape(step, *net.args, way(*net.args))


def closed_over_whole(net, way):
    """The scale of the update is the same constant."""
    params, state, x = net.args
    jax.eval_shape(lambda p: net.apply(p, state, way(p, state, x)), params)


def restored(net, way):
    jit(net, way)
    net.step(way)(*pickle.loads(pickle.dumps(net.args)))


def notebook_cell_twice(net, way):
    """In the second run, a compiled gradient is not traced again."""
    step = net.step(apart(way))
    for _ in range(2):
        jax.make_jaxpr(step)(*net.args)


def from_a_gradient(net, way):
    """Weights start as a gradient."""
    params, state, x = net.args
    net.step(way)(way(params, state, x), state, x)


def with_replaced_parameters(net, way):
    """The second step gets leaves that were returned in the place of gradients."""
    x = net.args[2]
    params = {"w": x, "_overwrite_with_gradient": x}

    def step(params, state):
        grads = ls.grad(lambda p: loss_fn([*p.values()], x), state)(params)
        new, state = net.apply(params, state, grads)
        return {**grads, "w": new["w"]}, state

    for run in (jax.jit, lambda f: f):
        run(lambda params: step(*step(params, net.tx.init(params))))(params)


UNUSUAL = [
    *(in_parts, unscaled_apart, in_parts_at_a_fixed_scale, two_networks),
    one_gradient_of_two_networks,
    *(one_step_late, closed_over_whole, restored, notebook_cell_twice),
    *(from_a_gradient, with_replaced_parameters),
]


def warnings_of(program, *args):
    """The warnings of a program, without that of the copies in float32."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*float32 copies")
        program(*args)
    return [str(w.message) for w in seen]


def assert_warns_once(message, program, *args):
    [text] = warnings_of(program, *args)
    assert text.startswith(message)


@pytest.mark.parametrize("way", RIGHT)
def test_right_step_never_warns(way):
    """The second one meets what the first has noted."""
    for _ in range(2):
        assert warnings_of(jit, NET, way) == []


@pytest.mark.parametrize("program", [x for x in PLACES if x is not jit])
@pytest.mark.parametrize("way", slow_but(QUICK, RIGHT))
def test_right_step_never_warns_in_any_place(way, program):
    assert warnings_of(program, NET, way) == []


@pytest.mark.parametrize("program", UNUSUAL)
def test_right_step_of_an_unusual_program_never_warns(program):
    assert warnings_of(program, NET, by_grad) == []


read_state, read_scale = ls.get_loss_scale_state, ls.get_loss_scale
# The program, and which of its parts are compiled.
READS = {
    "gradient compiled": (in_parts, by_grad, "gradient", read_state),
    "update compiled": (in_parts, by_grad, "update", read_state),
    "init and update compiled": (in_parts, by_grad, "init, update", read_state),
    "scale_backward": (in_parts, by_backward, "gradient", read_scale),
    "unscaling compiled": (unscaled_apart, None, read_state),
}


@pytest.mark.parametrize("row", READS)
def test_gradient_by_the_scale_alone_never_warns(row):
    program, *arguments = READS[row]
    assert warnings_of(program, NET, *arguments) == []


def test_gradients_made_in_shard_map_never_warn():
    """In ZeRO, the update is outside of it."""
    gradient = on_mesh(by_grad, PartitionSpec(), PartitionSpec())
    assert warnings_of(jit, NET, gradient) == []


def test_unscaled_loss_never_warns_at_a_fixed_scale_of_1():
    assert warnings_of(jit, Net(rule=ls.FixedLossScale(1.0)), unscaled) == []


class Weight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))


NNX_JITS = [(nnx.jit, lambda f: f), (lambda f: f, nnx.jit)]


@pytest.mark.parametrize(("outer", "inner"), NNX_JITS, ids=["whole", "in parts"])
@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_right_step_of_nnx_never_warns(make, outer, inner):
    @inner
    def gradient(model, optimizer):
        fun = make(lambda m: m.w.sum(), optimizer, value_and_grad=nnx.value_and_grad)
        return fun(model)[1]

    @inner
    def update(optimizer, model, grads):
        optimizer.update(model, grads)

    @outer
    def step(model, optimizer):
        update(optimizer, model, gradient(model, optimizer))

    model = Weight()
    optimizer = nnx.Optimizer(model, NET.tx, wrt=nnx.Param)
    assert warnings_of(step, model, optimizer) == []


@pytest.mark.parametrize("program", PLACES)
@pytest.mark.parametrize("way", WRONG)
def test_wrong_step_gives_one_warning(way, program):
    assert_warns_once(WRONG[way], program, NET, way)


@pytest.mark.parametrize("way", [by_grad, by_no_retries, by_backward])
def test_gradients_of_other_ways_warn_if_they_are_divided_twice(way):
    """Sums of gradients are new arrays."""
    again = functools.partial(divided_twice, way=way)
    assert_warns_once(DIVIDED_TWICE, jit, NET, again)


@pytest.mark.parametrize("program", PLACES)
def test_right_step_hides_no_forgotten_unscale(program):
    assert warnings_of(program, NET, by_hand) == []
    assert_warns_once(LEFT_SCALED, jit, NET, scaled)


@pytest.mark.parametrize("seed", slow_but(range(8), range(40)))
def test_right_programs_after_a_wrong_step_never_warn(seed):
    """After a right one, gradients of unknown origin might be its gradients."""
    rng = random.Random(seed)
    optimizers = SGD, MOMENTUM, CLIPPED, MASTERS
    wrong = rng.choice([*WRONG])
    first = rng.choice(PLACES), Net(rng.choice(optimizers)), wrong
    assert_warns_once(WRONG[wrong], *first)
    for _ in range(rng.randint(1, 4)):
        program = rng.choice([*PLACES, *UNUSUAL])
        run = program, Net(rng.choice(optimizers)), rng.choice(RIGHT)
        assert warnings_of(*run) == [], (first, run)


# The structure of a right program, and another one, of a wrong step.
STRUCTURES = {
    "moments": (Net(MASTERS), NET),
    "names": (Net(names=("kernel", "bias")), NET),
    "no arrays": (Net(CLIPPED), Net(SGD)),
}


@pytest.mark.parametrize(("right", "wrong"), STRUCTURES.values(), ids=STRUCTURES)
def test_right_program_hides_no_wrong_step_of_another_structure(right, wrong):
    for program in (in_parts, unscaled_apart):
        assert warnings_of(program, right, by_grad) == []
    for way in (unscaled, scaled):
        assert_warns_once(WRONG[way], jit, wrong, way)


@pytest.mark.parametrize("trace", [lambda f: f, jax.make_jaxpr], ids=["eager", "trace"])
def test_unscaling_after_the_update_warns_in_each_step(trace):
    """It gets the scale of the next step, which must not count as unscaled."""

    def late(params, state, x):
        params, state = NET.apply(params, state, scaled(params, state, x))
        ls.unscale_grads(x, state)
        return params, state, x

    first, second = warnings_of(trace(lambda *args: late(*late(*args))), *NET.args)
    assert first.startswith(LEFT_SCALED) and second.startswith(LEFT_SCALED)


@pytest.mark.parametrize("program", TRACED)
@pytest.mark.parametrize("way", [by_grad, by_retries, by_hand, by_backward])
def test_traced_update_warns_of_a_constant_scale(way, program):
    message = "The loss scale, 32768, is a constant of a compiled function"
    assert_warns_once(message, program, NET, closed_over(way, NET.args[1]))


def with_the_result_dropped(params, state, x):
    grads = scaled(params, state, x)
    ls.unscale_grads(grads, state)
    return grads


@pytest.mark.parametrize("program", TRACED)
def test_traced_update_warns_of_what_unscale_grads_was_given(program):
    message = "`update` got the input of `unscale_grads` instead of its result"
    assert_warns_once(message, program, NET, with_the_result_dropped)


@pytest.mark.parametrize("way", [by_grad, by_hand, by_no_retries, by_backward])
def test_update_refuses_gradients_as_parameters(way):
    def swapped(params, state, x):
        return NET.tx.update(params, state, way(params, state, x))

    def given_twice(params, state, x):
        grads = way(params, state, x)
        return NET.tx.update(grads, state, grads)

    for step in (swapped, given_twice):
        words = r"holds gradients.*update\(grads, state, p"
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(step, *NET.args)


BY_HAND = {
    "divided": lambda grad, scale: grad / scale,
    "multiplied": lambda grad, scale: scale * grad,
    "inverse": lambda grad, scale: grad * (1.0 / scale),
    "reciprocal": lambda grad, scale: jnp.reciprocal(scale) * grad,
    "cast": lambda grad, scale: grad / scale.astype(jnp.float16),
}


@pytest.mark.parametrize("program", [jit, scan, shard_map])
@pytest.mark.parametrize("change", BY_HAND.values(), ids=BY_HAND)
def test_traced_update_warns_of_gradients_divided_by_hand(change, program):
    def way(params, state, x):
        scale, grads = ls.get_loss_scale(state), by_grad(params, state, x)
        return jax.tree.map(lambda grad: change(grad, scale), grads)

    message = "`update` gets gradients that were multiplied or divided"
    assert_warns_once(message, program, NET, way)


@pytest.mark.parametrize("program", [jit, scan, shard_map])
def test_traced_loss_that_is_multiplied_by_the_scale_warns(program):
    def way(params, state, x):
        return ls.grad(lambda p: ls.get_loss_scale(state) * loss_fn(p, x), state)(
            params
        )

    message = "The loss is scaled twice: it is a product with the loss scale"
    assert_warns_once(message, program, NET, way)


@jax.jit
def clip(x):
    """A norm, which an overflow makes inf: the result is NaN."""
    return x / jnp.maximum(1, jnp.linalg.norm(x))


HIDING = {
    "clip": lambda x: jnp.clip(x, -1, 1),
    "optax.clip": lambda x: optax.clip(1.0).update(x, optax.EmptyState())[0],
    "clamp": lambda x: jax.lax.clamp(jnp.float32(-1), x, jnp.float32(1)),
    "nan_to_num": jnp.nan_to_num,
}
NOT_HIDING = {
    "norm": clip,
    "one side": lambda x: jnp.clip(x, 0),
    "one array": lambda x: jnp.clip(x, -1, 1) if x.ndim == 1 else x,
    "where": lambda x: jnp.where(jnp.isfinite(x), x, 0),
}


def changed_by(change, way=by_grad):
    return lambda *args: jax.tree.map(change, way(*args))


@pytest.mark.parametrize("way", [by_grad, by_hand, by_backward])
@pytest.mark.parametrize("change", HIDING.values(), ids=HIDING)
def test_traced_update_warns_of_gradients_whose_overflow_is_hidden(change, way):
    message = "`update` gets gradients after `jnp.clip` or `jnp.nan_to_num`"
    assert_warns_once(message, jit, NET, changed_by(change, way))


@pytest.mark.parametrize("change", NOT_HIDING.values(), ids=NOT_HIDING)
def test_traced_update_never_warns_of_gradients_that_keep_an_overflow(change):
    def step(params, state, x):
        grads = changed_by(change)(params, state, x)
        return NET.tx.update(grads, state, params)

    params = {**NET.args[0], "b": np.float32(1)}
    args = params, NET.tx.init(params), NET.args[2]
    assert warnings_of(jax.eval_shape, step, *args) == []


def test_hidden_overflow_does_not_warn_where_something_else_skips_the_step():
    clipped = changed_by(HIDING["clip"])
    fixed = Net(rule=ls.FixedLossScale(8.0))
    assert warnings_of(jit, fixed, clipped) == []

    def flagged(params, state, x):
        grads = by_grad(params, state, x)
        flag = {"grads_finite": ls.all_finite(grads)}
        changed = jax.tree.map(HIDING["clip"], grads)
        return NET.tx.update(changed, state, params, **flag)

    assert warnings_of(jax.eval_shape, flagged, *NET.args) == []

    def retried(params, state, x):
        grads, state = by_retries(params, state, x)
        return Retried(jax.tree.map(HIDING["clip"], grads), state)

    assert warnings_of(jit, NET, retried) == []


def test_gradients_of_two_states_that_are_exchanged_warn():
    """One of them alone may be the scale that both optimizers share."""

    def step(first, second):
        (p, s, x), (q, t, y) = first, second
        return NET.apply(p, s, by_grad(p, t, x)), NET.apply(q, t, by_grad(q, s, y))

    message = "The gradients were computed at the loss scale of another optimizer"
    assert_warns_once(message, jax.eval_shape, step, NET.args, Net().args)


def of_another(net, way):
    """A GAN whose generator is trained at the scale of the discriminator."""
    other = Net(CLIPPED)

    def step(args, other_state):
        params, state, x = args
        return net.apply(params, state, way(params, other_state, x))

    jax.eval_shape(step, net.args, other.args[1])


@pytest.mark.parametrize("way", [by_grad, by_no_retries, by_hand, by_backward])
def test_traced_update_warns_of_the_scale_of_another_optimizer(way):
    message = "The gradients were computed at the loss scale of another optimizer"
    assert_warns_once(message, of_another, NET, way)


def test_traced_update_never_warns_of_a_constant_fixed_scale():
    net = Net(rule=ls.FixedLossScale(8.0))
    assert warnings_of(jit, net, closed_over(by_grad, net.args[1])) == []


def test_eager_update_never_warns_of_a_constant_scale():
    """An eager function may get another state each time, also under a derivative."""

    def next_loss(*args):
        params, _, x = NET.step(closed_over(by_grad, NET.args[1]))(*args)
        return loss_fn(params, x)

    gradient = jax.grad(next_loss, argnums=(0, 1), allow_int=True)
    assert warnings_of(gradient, *NET.args) == []


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

    refs = run(NET.tx, lambda w: w)
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_threads_with_one_state_do_not_warn():
    def train_in_threads():
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: eager(NET, by_hand), range(40)))

    assert warnings_of(train_in_threads) == []
