"""Warnings: the line they name, and losses that are not scaled, or scaled twice."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import on_mesh
from training import normal

import optax_lossscale as ls

STATE = ls.DynamicLossScale().init()
pytestmark = pytest.mark.usefixtures("new_process")


def half_loss(w):
    return jnp.sum(w.astype(jnp.float16))  # a float16 loss is warned of


def by_function(w):
    return ls.grad(half_loss, STATE)(w)


def by_hand(w):
    return ls.scale_loss(half_loss(w), STATE)


steps = [by_function, by_hand, jax.jit(by_function), jax.vmap(by_function)]


@pytest.mark.parametrize("step", steps)
@pytest.mark.filterwarnings("ignore:The loss scale, 32768, is a constant")
def test_a_warning_names_the_line_of_the_user_however_it_is_called(step):
    with pytest.warns(UserWarning, match="The loss is float16") as warned:
        step(jnp.ones((2, 2)))
    [warning] = [w for w in warned if "float16" in str(w.message)]
    assert warning.filename == __file__
    code = getattr(step, "__wrapped__", step).__code__
    assert warning.lineno == code.co_firstlineno + 1


def test_code_that_is_executed_without_a_name_is_warned_of():
    names = {"ls": ls, "loss": half_loss(jnp.ones(2)), "state": STATE}
    with pytest.warns(UserWarning, match="The loss is float16"):
        exec(compile("ls.scale_loss(loss, state)", "a page", "exec"), names)


class Network:
    """Parameters of some width, and all that trains them."""

    def __init__(self, width, optimizer=optax.adam, **options):
        self.params = {"w": jnp.ones((width, 3)), "b": jnp.ones(3)}
        self.x = jnp.asarray(normal(5, width))
        self.tx = ls.with_loss_scaling(optimizer(0.1), **options)
        self.state = self.tx.init(self.params)

    def loss(self, params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    def plain_step(self, params, state, x, log=lambda state: None):
        log(state)
        _, grads = jax.value_and_grad(self.loss)(params, x)
        return self.applied(params, state, grads)

    def step(self, params, state, x, by=ls.value_and_grad):
        grads = by(self.loss, state)(params, x)[1]
        return self.applied(params, state, grads)

    def applied(self, params, state, grads):
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(self, step, times=2):
        for _ in range(times):
            self.params, self.state = step(self.params, self.state, self.x)


@contextlib.contextmanager
def warned(message):
    """One warning, which begins with the message."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [str(w.message)[: len(message)] for w in seen] == [message]


NOT_SCALED = "No loss has been scaled for this optimizer state"


@pytest.mark.parametrize("around", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_a_loss_that_is_not_scaled_is_warned_of_once_whatever_is_read(around):
    def read(state):
        for function in (ls.get_loss_scale, ls.was_applied, ls.check_loss_scale):
            function(state)
        optax.tree.get(state, "loss_scale")

    net = Network(4)
    read(net.state)
    with warned(NOT_SCALED):
        net.run(around(functools.partial(net.plain_step, log=read)))


@pytest.mark.parametrize("first", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_another_network_whose_loss_is_not_scaled_is_warned_of(first):
    """In a notebook, or the generator of a GAN whose discriminator is right."""
    right, wrong = Network(4), Network(7)
    right.run(jax.jit(functools.partial(right.step, by=first)))
    with warned(NOT_SCALED):
        wrong.run(jax.jit(wrong.plain_step))


def halves(net):
    gradient = jax.jit(lambda p, s, x: ls.grad(net.loss, s)(p, x))
    update = jax.jit(net.applied)
    net.run(lambda p, s, x: update(p, s, gradient(p, s, x)))
    # A compiled function that is kept, in a sweep over learning rates.
    other = Network(4, lambda _: optax.adam(0.3))
    other.run(lambda p, s, x: jax.jit(other.applied)(p, s, gradient(p, s, x)))


def init_inside(net):
    jax.eval_shape(net.tx.init, net.params)
    jax.jit(lambda p, x: net.step(p, net.tx.init(p), x))(net.params, net.x)


def trainer(net):
    gradient = jax.jit(jax.grad(ls.scale_backward(net.loss, 8.0)))
    gradient(net.params, net.x)
    net.state = net.tx.init(net.params)
    net.run(lambda p, s, x: net.applied(p, s, gradient(p, x)))


def scale_state_alone(net):
    net.run(
        jax.jit(
            lambda p, s, x: net.applied(p, s, ls.grad(net.loss, s.scale_state)(p, x))
        )
    )


def sharded_update(net):
    """The state of each device is a shard, as in ZeRO."""
    net = Network(8, lambda rate: optax.sgd(rate, momentum=0.9), axis_name="d")
    specs = {"w": P("d"), "b": P()}
    states = optax.tree.map_params(
        net.tx,
        lambda _, spec: spec,
        net.state,
        specs,
        transform_non_params=lambda _: P(),
    )
    update = on_mesh(net.applied, (specs, states, specs), (specs, states))
    net.run(lambda p, s, x: update(p, s, ls.grad(net.loss, s)(p, x)), times=1)


def chained(net):
    net.tx = optax.chain(optax.clip(1.0), net.tx)
    net.state = net.tx.init(net.params)
    net.run(jax.jit(net.step))


def at_scale_1(net):
    for skip in (True, False):
        net = Network(4, rule=ls.FixedLossScale(1.0, skip_nonfinite=skip))
        net.run(jax.jit(net.plain_step))


RIGHT = {
    "chained": chained,
    "halves of a step, and a sweep": halves,
    "init inside the step": init_inside,
    "a scale without its optimizer": scale_state_alone,
    "a sharded update": sharded_update,
    "a trainer, at a number": trainer,
    "scale 1": at_scale_1,
}


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_programs_that_are_right_are_not_warned_of(program):
    program(Network(4))  # warnings are errors


def by_hand(net, params, state, x):
    return jax.grad(lambda p: ls.scale_loss(net.loss(p, x), state))(params)


def true(net, params, state, x):
    return ls.grad(net.loss, state)(params, x)


@pytest.mark.parametrize("around", [jax.jit, lambda step: step], ids=["jit", "eager"])
@pytest.mark.parametrize(
    ("gradients", "divisions", "message"),
    [
        (by_hand, 0, "`scale_loss` has scaled a loss, but `unscale_grads`"),
        (by_hand, 2, "The gradients are divided by the loss scale twice"),
        (true, 1, "The gradients are divided by the loss scale twice"),
    ],
)
def test_gradients_that_are_unscaled_never_or_twice_are_warned_of(
    gradients, divisions, message, around
):
    """It is the habit of PyTorch to unscale before clipping."""
    net = Network(4)

    def step(params, state, x):
        grads = gradients(net, params, state, x)
        for _ in range(divisions):
            grads = ls.unscale_grads(grads, state)
        return net.applied(params, state, grads)

    with warned(message):
        net.run(around(step), times=1)


def test_a_loss_that_is_scaled_twice_is_warned_of_once():
    net = Network(4)

    def loss(params, x, state):
        return ls.scale_loss(net.loss(params, x), state)

    def step(params, state, x):
        grads = ls.grad(functools.partial(loss, state=state), state)(params, x)
        return net.applied(params, state, grads)

    with warned("The loss is scaled twice"):
        net.run(jax.jit(step))

    def fails(params):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ls.value_and_grad(fails, net.state)(net.params)
    ls.scale_loss(net.loss(net.params, net.x), net.state)  # warnings are errors
