"""Gradients by the functions of other libraries that differentiate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits

import optax_lossscale as ls

X = jax.random.normal(jax.random.key(0), (16, 8))
Y = (X[:, :1] > 0).astype(jnp.float32)
RULE = ls.DynamicLossScale(init_scale=2.0**10)
TX = ls.with_loss_scaling(optax.adamw(3e-2), RULE)
BAD_X = X.at[3, 2].set(jnp.nan)


def cross_entropy(logits):
    return optax.sigmoid_binary_cross_entropy(logits, Y).mean()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(nnx.relu(self.hidden(x))))
        return self.out(x).astype(jnp.float32)


def nnx_loss(model, x):
    return cross_entropy(model(x))


@pytest.mark.parametrize("argnums", [0, nnx.DiffState(0, nnx.Param)])
def test_nnx_modules_change_in_place_and_have_the_gradients_of_nnx(argnums):
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(ours, TX, wrt=nnx.Param)

    @nnx.jit
    def both(ours, optimizer, theirs, x):
        fun = ls.value_and_grad(
            nnx_loss, optimizer, argnums=argnums, value_and_grad=nnx.value_and_grad
        )
        their_fun = nnx.value_and_grad(nnx_loss, argnums=argnums)
        return fun(ours, x), their_fun(theirs, x)

    (loss, grads), (their_loss, their_grads) = both(ours, optimizer, theirs, X)
    np.testing.assert_array_equal(loss, their_loss)
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(their_grads), strict=True)
    for a, e in leaves:
        np.testing.assert_allclose(a, e, rtol=2e-2, atol=1e-4)
    kinds = (nnx.BatchStat, nnx.RngState)
    ours, theirs = (jax.tree.leaves(nnx.state(m, kinds)) for m in (ours, theirs))
    assert_same_bits(ours, theirs)


def test_two_lines_train_an_nnx_module_and_skip_a_bad_batch():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        fun = ls.value_and_grad(nnx_loss, optimizer, value_and_grad=nnx.value_and_grad)
        loss, grads = fun(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    before = [jnp.copy(x) for x in before]
    assert np.isnan(step(model, optimizer, BAD_X))
    assert not ls.was_applied(optimizer)
    assert ls.get_loss_scale(optimizer) == 2.0**9
    assert_same_bits(jax.tree.leaves(nnx.state(model, nnx.Param)), before)


def test_retries_of_an_nnx_module_that_is_split():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    optimizer.opt_state.scale_state.loss_scale[...] = jnp.float32(2.0**24)

    @nnx.jit
    def step(model, optimizer, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params):
            merged = nnx.merge(graph, params, rest, copy=True)
            return 64.0 * nnx_loss(merged, x), nnx.state(merged, nnx.Not(nnx.Param))

        fun = ls.value_and_grad_with_retries(
            loss_fn, optimizer.opt_state, has_aux=True, max_retries=20
        )
        (loss, changed), grads, optimizer.opt_state = fun(params)
        nnx.update(model, changed)
        optimizer.update(model, grads)
        return loss

    before = jnp.copy(model.norm.mean[...])
    step(model, optimizer, X)
    assert ls.was_applied(optimizer) and 1 < ls.get_loss_scale(optimizer) < 2.0**16
    assert not (model.norm.mean[...] == before).any()


class Mlp(eqx.Module):
    layers: list
    activation: callable
    scale: float = eqx.field(static=True)

    def __call__(self, x):
        first, last = jax.tree.map(
            lambda p: p.astype(jnp.float16) if eqx.is_inexact_array(p) else p,
            self.layers,
        )
        x = self.activation(jax.vmap(first)(x.astype(jnp.float16)))
        return self.scale * jax.vmap(last)(x).astype(jnp.float32)


def equinox_loss(model, x):
    return cross_entropy(model(x)), model.activation


@pytest.mark.parametrize("retries", [pytest.param(True, marks=pytest.mark.slow), False])
def test_two_lines_train_an_equinox_module_and_skip_a_bad_batch(retries):
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(8, 16, key=keys[0]), eqx.nn.Linear(16, 1, key=keys[1])]
    model = Mlp(layers, jax.nn.relu, 1.0)
    options = {"has_aux": True, "value_and_grad": eqx.filter_value_and_grad}

    @eqx.filter_jit
    def step(model, opt_state, x):
        if retries:
            fun = ls.value_and_grad_with_retries(equinox_loss, opt_state, **options)
            (loss, activation), grads, opt_state = fun(model, x)
        else:
            fun = ls.value_and_grad(equinox_loss, opt_state, **options)
            (loss, activation), grads = fun(model, x)
        assert activation is jax.nn.relu and grads.activation is None
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(20):
        model, opt_state, loss = step(model, opt_state, X)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    skipped, opt_state, loss = step(model, opt_state, BAD_X)
    assert np.isnan(loss) and not ls.was_applied(opt_state)
    for a, e in zip(jax.tree.leaves(skipped), jax.tree.leaves(model), strict=True):
        assert a is e or (a == e).all()


def test_arguments_at_their_defaults_are_not_passed_on():
    seen = []

    def differentiate(fun, **options):
        seen.append(options)
        return jax.value_and_grad(fun, **options)

    state = RULE.init()
    fun = ls.grad(lambda x, y: x * y, state, value_and_grad=differentiate)
    assert fun(2.0, 3.0) == 3
    fun = ls.grad(lambda x, y: x * y, state, argnums=1, value_and_grad=differentiate)
    assert fun(2.0, 3.0) == 2
    assert seen == [{"has_aux": True}, {"has_aux": True, "argnums": 1}]


@pytest.mark.parametrize(
    "differentiate",
    [lambda fun, has_aux: jax.grad(fun, has_aux=True), lambda fun, has_aux: fun],
)
def test_what_returns_something_else_is_refused(differentiate):
    for function in (ls.value_and_grad, ls.grad, ls.value_and_grad_with_retries):
        fun = function(jnp.sin, RULE.init(), value_and_grad=differentiate)
        with pytest.raises(TypeError, match="`value_and_grad` must return what `jax.v"):
            fun(1.0)


def test_what_is_no_function_is_refused():
    with pytest.raises(
        TypeError, match="`value_and_grad` must be a function that diff"
    ):
        ls.value_and_grad(jnp.sin, RULE.init(), value_and_grad=True)
