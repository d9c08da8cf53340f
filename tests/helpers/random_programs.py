"""Random train steps, right and wrong, and what should be said of each.

Most are only traced. What runs eagerly calls compiled losses and optimizers: the
package runs eagerly then, and the rest compiles as a few programs.
"""

import contextlib
import functools
import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from meshes import on_mesh

import optax_lossscale as ls

NOT_SCALED = "No loss has been scaled for this optimizer state"
NOT_UNSCALED = "`scale_loss` has scaled a loss, but `unscale_grads` has"
DIVIDED_TWICE = "The gradients are divided by the loss scale twice"
SCALED_TWICE = "The loss is scaled twice"
CONSTANT = "The loss scale, 32768, is a constant of a compiled function"


@jax.jit
def loss_fn(params, x):
    return jnp.mean((x * params["w"] + params["b"]) ** 2)


# How a step makes its gradients, and what is wrong with that.


def by_value_and_grad(params, state, x):
    return ls.value_and_grad(loss_fn, state)(params, x)[1], state


def by_grad(params, state, x):
    return ls.grad(loss_fn, ls.get_loss_scale_state(state))(params, x), state


def by_scaled_backward(params, state, x):
    return jax.grad(ls.scale_backward(loss_fn, state))(params, x), state


def by_retries(params, state, x):
    _, grads, state = ls.value_and_grad_with_retries(loss_fn, state)(params, x)
    return grads, state


def by_hand(params, state, x):
    grads = scale_left_on(params, state, x)[0]
    return ls.unscale_grads(grads, state), state


def by_hand_and_getter(params, state, x):
    scale = ls.get_loss_scale(state)
    grads = jax.grad(lambda p: scale * loss_fn(p, x))(params)
    return ls.unscale_grads(grads, state), state


def by_micro_batches(params, state, x):
    def add(total, x):
        grads = ls.grad(loss_fn, state)(params, x)
        return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, jnp.stack([x, x]))[0], state


def by_two_losses(params, state, x):
    """One by the function, one by hand."""
    grads = by_value_and_grad(params, state, x)[0]
    return jax.tree.map(jnp.add, grads, by_hand(params, state, x)[0]), state


def by_value_and_grad_with_a_log(params, state, x):
    """What is logged is the scaled loss, which nobody differentiates."""
    loss, grads = ls.value_and_grad(loss_fn, state)(params, x)
    ls.scale_loss(loss, state)
    return grads, state


def by_meta_learning(params, state, x):
    """An inner loop, with a scale of its own, inside of the scaled loss."""
    tx = ls.with_loss_scaling(optax.sgd(0.1))

    def outer_loss(params, x):
        inner_state = tx.init(params)
        grads, inner_state = by_hand(params, inner_state, x)
        updates, _ = tx.update(grads, inner_state, params)
        return loss_fn(optax.apply_updates(params, updates), x)

    return ls.grad(outer_loss, state)(params, x), state


def forgotten(params, state, x):
    return jax.grad(loss_fn)(params, x), state


def scale_left_on(params, state, x):
    return jax.grad(lambda p: ls.scale_loss(loss_fn(p, x), state))(params), state


def divided_twice(way):
    def wrong_way(params, state, x):
        grads, state = way(params, state, x)
        return ls.unscale_grads(grads, state), state

    wrong_way.__name__ = f"{way.__name__}_divided_twice"
    return wrong_way


def scaled_twice(params, state, x):
    def scaled_loss_fn(params, x):
        return ls.scale_loss(loss_fn(params, x), state)

    return ls.grad(scaled_loss_fn, state)(params, x), state


RIGHT_WAYS = [
    *(by_value_and_grad, by_grad, by_scaled_backward, by_retries, by_hand),
    *(by_hand_and_getter, by_micro_batches, by_two_losses, by_meta_learning),
    by_value_and_grad_with_a_log,
]
WRONG_WAYS = [
    (forgotten, NOT_SCALED),
    (scale_left_on, NOT_UNSCALED),
    *(
        (divided_twice(way), DIVIDED_TWICE)
        for way in (by_value_and_grad, by_retries, by_hand, by_hand_and_getter)
    ),
    (scaled_twice, SCALED_TWICE),
]


def compiled(optimizer):
    return optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))


OPTIMIZERS = [
    compiled(optax.sgd(0.1)),
    compiled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
    compiled(optax.adam(0.1)),
    compiled(ls.with_master_weights(optax.sgd(0.1, momentum=0.9))),
]
ADAM = OPTIMIZERS[2]
apply_updates = jax.jit(optax.apply_updates)


class Network:
    """Parameters of some width, and all that trains them."""

    def __init__(self, width, optimizer):
        rule = ls.DynamicLossScale()
        self.tx = ls.with_loss_scaling(optimizer, rule)
        self.x = np.ones(width, np.float32)
        self.params = {"w": self.x, "b": self.x}
        self.state = self.tx.init(self.params)

    def step(self, way, params, state, x):
        grads, state = way(params, state, x)
        return self.apply(params, state, grads)

    def apply(self, params, state, grads):
        updates, state = self.tx.update(grads, state, params)
        return apply_updates(params, updates), state

    @property
    def args(self):
        return self.params, self.state, self.x


# The places where a whole step is traced, or runs once.


def in_jit(step, net):
    jax.eval_shape(step, *net.args)


def eagerly(step, net):
    step(*net.args)


def in_scan(step, net):
    def body(carry, x):
        return step(*carry, x), None

    jax.eval_shape(lambda p, s, x: jax.lax.scan(body, (p, s), x[None]), *net.args)


def in_fori_loop(step, net):
    params, state, x = net.args
    jax.eval_shape(
        lambda: jax.lax.fori_loop(0, 2, lambda _, c: step(*c, x), (params, state))
    )


def in_checkpoint(step, net):
    jax.eval_shape(jax.checkpoint(step), *net.args)


def in_vmap(step, net):
    args = jax.tree.map(lambda x: np.stack([x, x]), net.args)
    jax.eval_shape(jax.vmap(step), *args)


def in_shard_map(step, net):
    jax.eval_shape(on_mesh(step, (P(), P(), P()), P()), *net.args)


def restored(step, net):
    in_jit(step, net)
    net.params, net.state = pickle.loads(pickle.dumps((net.params, net.state)))
    eagerly(step, net)


def in_cells(step, net):
    """A cell that is run again, after a look at the shapes."""
    for _ in range(2):
        jax.eval_shape(net.tx.init, net.params)
        jax.make_jaxpr(lambda *args: step(*args))(*net.args)


RIGHT_PLACES = [in_jit, eagerly, in_scan, in_fori_loop, in_checkpoint, in_vmap]
RIGHT_PLACES += [in_shard_map, restored, in_cells]
WRONG_PLACES = [in_jit, eagerly, in_scan, in_fori_loop, in_checkpoint, in_vmap]


# Programs of another shape. The objects of these differ between loss and update.


def halves(net, way):
    gradient = jax.jit(lambda *args: way(*args)[0])
    for _ in range(2):  # in a sweep, where the gradient function is kept
        update = jax.jit(net.apply)
        for _ in range(2):
            grads = jax.eval_shape(gradient, *net.args)
            args = net.params, net.state, grads
            net.params, net.state = jax.eval_shape(update, *args)


def inner_jit(net, way):
    gradient = jax.jit(lambda *args: way(*args))
    for _ in range(2):

        def step(params, state, x):
            grads, state = gradient(params, state, x)
            return net.apply(params, state, grads)

        jax.eval_shape(step, *net.args)


def unscaled_in_jit(net, way):
    unscale = jax.jit(lambda *args: ls.unscale_grads(*args))
    for _ in range(2):
        grads, state = scale_left_on(*net.args)
        net.apply(net.params, state, unscale(grads, state))


def gradients_in_shard_map(net, way):
    """The state is sharded, as in ZeRO."""
    specs = {"w": P(), "b": P()}
    states = optax.tree.map_params(
        *(net.tx, lambda _, spec: spec, net.state, specs),
        transform_non_params=lambda _: P(),
    )
    gradient = on_mesh(lambda *a: by_value_and_grad(*a)[0], (specs, states, P()), P())

    def step(params, state, x):
        return net.apply(params, state, gradient(params, state, x))

    jax.eval_shape(step, *net.args)


def trainer_at_a_number(net, way):
    gradient = jax.jit(jax.grad(ls.scale_backward(loss_fn, 8.0)))
    for _ in range(2):
        net.apply(net.params, net.state, gradient(net.params, net.x))


APART = [halves, inner_jit, unscaled_in_jit, gradients_in_shard_map]
APART += [trainer_at_a_number]
LATE_WAYS = [by_value_and_grad, by_scaled_backward, by_hand, by_micro_batches]


# Programs that are no step of their own.


def train_state(net, way):
    state = TrainState.create(apply_fn=loss_fn, params=net.params, tx=net.tx)

    def step(state, x):
        grads = ls.grad(state.apply_fn, state)(state.params, x)
        return state.apply_gradients(grads=grads)

    jax.eval_shape(step, state, net.x)


def nnx_optimizer(net, way):
    model = nnx.Linear(len(net.params["w"]), 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, net.tx, wrt=nnx.Param)
    make = random.Random(len(net.x)).choice(
        [ls.value_and_grad, ls.value_and_grad_with_retries]
    )

    @nnx.jit
    def step(model, optimizer, x):
        fun = make(
            lambda model: jnp.mean(model(x) ** 2),
            optimizer,
            value_and_grad=nnx.value_and_grad,
        )
        optimizer.update(model, fun(model)[1])

    step(model, optimizer, net.x)


def two_models(net, way):
    """As in a GAN: both losses, then both updates."""

    def step(params, state, x):
        grads, state = way(params, state, x)
        other_grads, other_state = by_value_and_grad(params, net.tx.init(params), x)
        other = net.apply(params, other_state, other_grads)
        return net.apply(params, state, grads), other

    jax.eval_shape(step, *net.args)


def two_optimizers(net, way):
    """One loss, whose gradients go to optimizers with scales of their own."""
    other = ls.with_loss_scaling(optax.sgd(0.1))

    def step(params, state, other_state, x):
        grads, state = by_value_and_grad(params, state, x)
        updates = other.update(grads["w"], other_state, params["w"])
        return net.apply(params, state, grads), updates

    jax.eval_shape(step, net.params, net.state, other.init(net.x), net.x)


def one_step_late(net, way):
    """As in pipelines: the gradients of a step are applied in the next one."""
    params, state, x = net.args
    late = way(params, state, x)[0]
    for _ in range(2):
        grads = way(params, state, x)[0]
        params, state = net.apply(params, state, late)
        late = grads


def for_two_steps(net, way):
    """The same gradients are applied twice, by a compiled function of their own."""
    gradient = jax.jit(lambda *args: way(*args)[0])
    params, state, x = net.args
    grads = gradient(params, state, x)
    for _ in range(2):
        params, state = net.apply(params, state, grads)


def raised(net, way):
    """A loss that raises leaves nothing behind, and a look at the function either."""

    def bad_loss(params, x):
        raise ZeroDivisionError

    params, state, x = net.args
    repr(ls.value_and_grad(loss_fn, state))
    for fun in (ls.grad, ls.value_and_grad_with_retries):
        with contextlib.suppress(ZeroDivisionError):
            fun(bad_loss, state)(params, x)
    in_jit(functools.partial(net.step, forgotten), net)


def two_models_at_bare_scales(net, way):
    """A helper takes the scale alone; both gradients come before both updates."""
    number = jax.jit(lambda p, s, x: jax.grad(ls.scale_backward(loss_fn, s))(p, x))
    alone = jax.jit(lambda p, s, x: ls.grad(loss_fn, s)(p, x))
    read = {number: ls.get_loss_scale, alone: ls.get_loss_scale_state}
    for gradient, get in read.items():
        nets = [Network(width, ADAM) for width in (8, 9)]
        grads = [gradient(n.params, get(n.state), n.x) for n in nets]
        for n, g in zip(nets, grads, strict=True):
            n.apply(n.params, n.state, g)


def penalty(net, way):
    """An inner gradient is scaled and divided by hand, as PyTorch's recipe does."""

    def step(params, state, x):
        def penalized(params):
            slope = by_hand(params, state, x)[0]
            return loss_fn(params, x) + optax.tree.norm(slope, squared=True)

        return net.apply(params, state, ls.grad(penalized, state)(params))

    in_jit(step, net)


def fixed_at_1_beside(net, way):
    """Its update does not use up the scale of the other optimizer."""
    other = ls.with_loss_scaling(ADAM, ls.FixedLossScale(1.0))
    grads = jax.jit(lambda p, s, x: ls.grad(loss_fn, s)(p, x))(
        net.params, ls.get_loss_scale_state(net.state), net.x
    )
    other.update(jax.grad(loss_fn)(net.params, net.x), other.init(net.params))
    net.apply(net.params, net.state, grads)


def unscaled_in_jit_alone(net, way):
    unscale = jax.jit(lambda *args: ls.unscale_grads(*args))
    grads, state = scale_left_on(*net.args)
    net.apply(net.params, state, unscale(grads, ls.get_loss_scale_state(state)))


def with_an_integer(net, way):
    count = jax.device_put(np.int32(3))
    for _ in range(2):
        grads = {**scale_left_on(*net.args)[0], "count": count}
        grads = ls.unscale_grads(grads, net.state)
        del grads["count"]
        net.apply(net.params, net.state, grads)


def one_scale_beside(net, way):
    """One scale for several optimizers, which only skip."""
    rule = ls.DynamicLossScale()
    skips = ls.with_loss_scaling(ADAM, ls.FixedLossScale(1.0))

    def step(params, state, scale_state, x):
        grads = ls.grad(loss_fn, scale_state)(params, x)
        updates, state = skips.update(grads, state, params)
        scale_state = rule.update(scale_state, ls.all_finite(grads))
        return optax.apply_updates(params, updates), state, scale_state

    jax.eval_shape(step, net.params, skips.init(net.params), rule.init(), net.x)


def at_scale_1(net, way):
    net.tx = ls.with_loss_scaling(ADAM, ls.FixedLossScale(1.0))
    net.state = net.tx.init(net.params)
    in_jit(functools.partial(net.step, forgotten), net)


def eager_scan_by_closure(net, way):
    """Each call traces anew: the scale is a constant of each, and none is wrong."""
    for _ in range(2):
        grads, state = by_micro_batches(*net.args)
        net.params, net.state = net.apply(net.params, state, grads)


def constant(net, way):
    """A gradient function that was built once holds the first scale."""
    fun = ls.grad(loss_fn, net.state)

    def update(params, state, x):
        return net.apply(params, state, fun(params, x))

    jax.eval_shape(update, *net.args)


OTHERS = [train_state, nnx_optimizer, two_models, one_scale_beside, at_scale_1]
OTHERS += [eager_scan_by_closure, penalty, with_an_integer, two_optimizers]
OTHERS += [one_step_late, for_two_steps]
# They are defined below the others.
APART += [two_models_at_bare_scales, fixed_at_1_beside, unscaled_in_jit_alone]


def random_programs(rng):
    """Yield the names of some programs, the programs, and what is said of them.

    The wrong one comes first: after a right step of the same model, its compiled
    gradients might be those of any other.
    """
    wrong = [(place, way, text) for way, text in WRONG_WAYS for place in WRONG_PLACES]
    wrong += 6 * [(constant, None, CONSTANT), (raised, None, NOT_SCALED)]
    programs = [rng.choice(wrong)]
    for _ in range(rng.randint(1, 4)):
        place = rng.choice(APART + OTHERS if rng.random() < 0.6 else RIGHT_PLACES)
        is_late = place in (one_step_late, for_two_steps)
        programs.append((place, rng.choice(LATE_WAYS if is_late else RIGHT_WAYS), None))
    for place, way, message in programs:
        # `nnx.Optimizer` of Flax 0.11 takes no master weights.
        is_adam = place in (*APART, nnx_optimizer)
        optimizer = ADAM if is_adam else rng.choice(OPTIMIZERS)
        net = Network(rng.choice([2, 3]), optimizer)
        is_step = place in (*RIGHT_PLACES, *WRONG_PLACES)
        args = (functools.partial(net.step, way), net) if is_step else (net, way)
        name = f"{place.__name__} {getattr(way, '__name__', '')}"
        yield name, functools.partial(place, *args), [message] if message else []
