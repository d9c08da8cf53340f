"""Flax NNX objects, which change in place, in a loop that computes them again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax import nnx
from training import normal

import optax_lossscale as ls

X = jnp.asarray(normal(16, 8))
TX = ls.with_loss_scaling(optax.adamw(3e-2))
HIGH = ls.DynamicLossScale(init_scale=2.0**20).init()
once = functools.partial(ls.value_and_grad, value_and_grad=nnx.value_and_grad)
retried = functools.partial(
    ls.value_and_grad_with_retries, max_retries=20, value_and_grad=nnx.value_and_grad
)


class Tied(nnx.Module):
    """It counts, draws and keeps statistics, and changes its structure."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        linear = nnx.Linear(8, 8, dtype=jnp.float16, use_bias=False, rngs=rngs)
        self.first = self.second = linear
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.old = nnx.Cache(jnp.zeros(3))

    def __call__(self, x):
        assert self.first is self.second
        self.calls[...] += 1
        y = self.second(self.dropout(self.norm(self.first(x))))
        del self.old
        self.newest = nnx.Cache(x)
        self.new = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.eval()
        return y


def steep(x):
    """A loss whose gradients overflow at a scale of 2**10."""
    return 64.0 * jnp.sum(x.astype(jnp.float16)).astype(jnp.float32)


def test_module_changes_once_however_often_it_is_retried():
    def loss_fn(model, x):
        loss = 64.0 * jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0))
        return loss, model.first.kernel[0, 0]

    graphs, results = [], []
    for make, first_scale in ((retried, 2.0**20), (once, 2.0**11)):
        model = Tied()
        kernel, graph = model.first.kernel, nnx.graphdef(model)
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        optimizer.opt_state.scale_state.loss_scale[...] = jnp.float32(first_scale)

        @nnx.jit
        def step(model, optimizer, x, make=make):
            output, grads, *state = make(loss_fn, optimizer, has_aux=True)(model, x=x)
            assert all(x is optimizer for x in state)
            optimizer.update(model, grads)
            return output, grads

        result = step(model, optimizer, X)
        assert int(model.calls[...]) == int(model.dropout.rngs.count[...]) == 1
        assert model.first.kernel is model.second.kernel is kernel
        assert np.array_equal(model.newest[...], X)
        assert ls.was_applied(optimizer)
        assert float(ls.get_loss_scale(optimizer)) == 2.0**11
        graphs.append(nnx.graphdef(model))
        results.append(jax.tree.leaves((result, nnx.state((model, optimizer)))))
    assert graphs[0] == graphs[1] != graph
    assert_same_bits(*results)


def test_arguments_may_share_variables_and_come_back():
    counter = nnx.Variable(jnp.zeros((), jnp.int32))
    models = Tied(), Tied()
    models[0].calls = models[1].calls = counter
    weight, calls = nnx.Param(jnp.ones(3)), nnx.Variable(jnp.zeros((), jnp.int32))

    def loss_fn(weight, modules, calls):
        calls[...] += 1
        for module in modules:
            module.calls[...] += 1
        new = nnx.Param(2.0 * weight[...])
        return steep(weight[...]), (modules[0], new, "aux")

    fun = retried(loss_fn, HIGH, has_aux=True)
    (_, (same, new, aux)), grad, _ = fun(weight, models, calls)
    assert same is models[0] and aux == "aux"
    assert int(counter[...]) == 2 and int(calls[...]) == 1
    assert np.array_equal(new[...], [2, 2, 2])
    assert np.array_equal(jax.tree.leaves(grad)[0], [64, 64, 64])


@pytest.mark.parametrize("make", [once, ls.value_and_grad_with_retries])
def test_kept_function_follows_an_optimizer_that_changes(make):
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    tx = ls.with_loss_scaling(optax.sgd(0.01), ls.DynamicLossScale(init_scale=2.0**11))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    fun = make(lambda m: steep(m(X)), optimizer, value_and_grad=nnx.value_and_grad)
    update = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    for _ in range(3):
        _, grads, *_ = fun(model)
        update(optimizer, model, grads)
    assert ls.was_applied(optimizer) and float(ls.get_loss_scale(optimizer)) < 2.0**11


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_scale_is_read_from_variables_of_the_new_kinds(kind):
    if not hasattr(nnx, "var_defaults"):
        pytest.skip("this Flax has no such variables")
    with nnx.var_defaults(**{kind: True}):
        model = nnx.Linear(8, 1, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    assert float(ls.get_loss_scale(optimizer)) == 2.0**15
    assert bool(ls.was_applied(optimizer))
    assert float(ls.grad(lambda w: w**2, optimizer)(3.0)) == 6.0
    assert float(jax.jit(ls.get_loss_scale)(optimizer)) == 2.0**15


def test_split_module_is_differentiated_by_jax():
    graph, params, rest = nnx.split(nnx.Linear(8, 1, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def split_loss(params, rest):
        return steep(nnx.merge(graph, params, rest)(X))

    ours = ls.grad(split_loss, TX.init(params))(params, rest)
    assert jax.tree.structure(ours) == jax.tree.structure(params)
