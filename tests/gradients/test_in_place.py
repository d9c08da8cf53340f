"""Modules of Flax NNX, which change in place, in a loop that computes them again."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, without_keys

import optax_lossscale as ls

X = jax.random.normal(jax.random.key(0), (16, 8))
TX = ls.with_loss_scaling(optax.adamw(3e-2))


class Tied(nnx.Module):
    def __init__(self, rngs):
        linear = nnx.Linear(8, 8, dtype=jnp.float16, use_bias=False, rngs=rngs)
        self.first = self.second = linear
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        assert self.first is self.second
        self.calls[...] += 1
        self.newest = nnx.Cache(x)
        return self.second(self.dropout(self.norm(self.first(x))))


def loss_fn(model, x):
    loss = 64.0 * jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0))
    return loss, model.first.kernel[0, 0]


@pytest.mark.parametrize(
    "compiled", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_module_changes_once_however_often_its_gradients_are_repeated(compiled):
    results = []
    for retries in (True, False):
        model = Tied(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        scale = optimizer.opt_state.scale_state.loss_scale
        scale[...] = jnp.float32(2.0**20 if retries else 2.0**11)
        options = {"has_aux": True, "value_and_grad": nnx.value_and_grad}

        def step(model, optimizer, x, retries=retries, options=options):
            if retries:
                fun = ls.value_and_grad_with_retries(
                    loss_fn, optimizer, max_retries=20, **options
                )
                *result, returned = fun(model, x=x)
                assert returned is optimizer
            else:
                result = ls.value_and_grad(loss_fn, optimizer, **options)(model, x=x)
            optimizer.update(model, result[1])
            return result

        result = (nnx.jit(step) if compiled else step)(model, optimizer, X)
        assert model.calls[...] == model.dropout.rngs.count[...] == 1
        assert model.first is model.second and np.array_equal(model.newest[...], X)
        assert ls.was_applied(optimizer) and ls.get_loss_scale(optimizer) == 2.0**11
        results.append(jax.tree.leaves((result, nnx.state((model, optimizer)))))
    if compiled:
        assert_same_bits(*results)
    for a, e in zip(*map(jax.tree.leaves, map(without_keys, results)), strict=True):
        # The loop is always compiled, and rounds less often.
        np.testing.assert_allclose(a, e, rtol=0.05, atol=0.05)


def test_the_state_may_hold_objects_beside_the_scale():
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    state = {"model": model, "opt_state": TX.init(nnx.to_pure_dict(params))}

    def loss_fn(w):
        return 64.0 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)

    fun = ls.value_and_grad_with_retries(loss_fn, state, max_retries=10)
    _, _, new_state = fun(jnp.ones(3))
    assert new_state["model"] is model
    assert ls.get_loss_scale(state) == 2.0**15 > ls.get_loss_scale(new_state)


def test_the_loop_does_not_carry_what_is_as_it_was():
    """Parameters and keys are among what a module holds."""
    model = Tied(nnx.Rngs(0))
    graph, contents = nnx.split(model)

    def step(contents, state, x):
        model = nnx.merge(graph, contents)
        fun = ls.value_and_grad_with_retries(
            lambda model, x: loss_fn(model, x)[0],
            state,
            value_and_grad=nnx.value_and_grad,
        )
        return *fun(model, x), nnx.state(model)

    jaxpr = jax.make_jaxpr(step)(contents, ls.DynamicLossScale().init(), X)
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "while"]
    carried = [v.aval.shape for v in loop.outvars]
    # Attempts, the scale, whether it overflowed, the loss; the gradients of a matrix
    # and of the two vectors of the norm; its two statistics and two counters.
    expected = [()] * 6 + [(8, 8)] + [(8,)] * 4
    assert sorted(carried) == sorted(expected)


class Changing(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rule_state = nnx.Cache(jnp.zeros(3))
        self.count = 0


def leave_memory(model):
    del model.rule_state


def remember_statistics(model):
    model.rule_state = nnx.BatchStat(jnp.ones(3))


def count(model):
    model.count += 1


def grow(model):
    model.adapter = nnx.Linear(3, 3, rngs=nnx.Rngs(1))


def tie(model):
    model.same = model.rule_state


CHANGES = [nnx.Module.eval, leave_memory, remember_statistics, count, grow, tie]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_module_may_change_its_structure(change):
    def loss_fn(model, x):
        change(model)
        return 64.0 * jnp.mean(model.linear(x).astype(jnp.float16)).astype(jnp.float32)

    repeated, once = Changing(), Changing()
    kernel = repeated.linear.kernel

    @nnx.jit
    def step(model, x):
        state = ls.DynamicLossScale(init_scale=2.0**20).init()
        fun = ls.value_and_grad_with_retries(
            loss_fn, state, max_retries=20, value_and_grad=nnx.value_and_grad
        )
        return fun(model, x)

    x = jnp.ones((2, 3))
    _, grads, state = step(repeated, x)
    assert ls.all_finite(grads) and ls.get_loss_scale(state) < 2.0**20
    nnx.value_and_grad(loss_fn)(once, x)
    assert nnx.graphdef(repeated) == nnx.graphdef(once) != nnx.graphdef(Changing())
    assert_same_bits(*(jax.tree.leaves(nnx.state(m)) for m in (repeated, once)))
    assert repeated.linear.kernel is kernel


def test_arguments_may_share_variables_and_be_variables_and_come_back():
    counter = nnx.Variable(jnp.zeros((), jnp.int32))
    model, other = Changing(), Changing()
    model.counter = other.counter = counter
    weight, calls = nnx.Param(jnp.ones(3)), nnx.Variable(jnp.zeros((), jnp.int32))

    def loss_fn(weight, modules, calls):
        calls[...] += 1
        for module in modules:
            module.counter[...] += 1
        new = nnx.Param(2.0 * weight[...])
        loss = 64.0 * jnp.sum(weight[...].astype(jnp.float16)).astype(jnp.float32)
        return loss, (modules[0], new, "aux")

    fun = ls.value_and_grad_with_retries(
        loss_fn,
        ls.DynamicLossScale(init_scale=2.0**20).init(),
        max_retries=20,
        has_aux=True,
        value_and_grad=nnx.value_and_grad,
    )
    (_, (same, new, aux)), grad, _ = fun(weight, (model, other), calls)
    assert same is model and aux == "aux"
    assert counter[...] == 2 and calls[...] == 1
    assert np.array_equal(new[...], [2, 2, 2])
    assert np.array_equal(jax.tree.leaves(grad)[0], [64, 64, 64])


@pytest.mark.parametrize("retries", [False, True])
def test_a_function_that_is_kept_follows_an_optimizer_that_changes(retries):
    model = nnx.Linear(8, 1, dtype=jnp.float16, rngs=nnx.Rngs(0))
    rule = ls.DynamicLossScale(init_scale=2.0**20)
    tx = ls.with_loss_scaling(optax.sgd(0.01), rule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    make = ls.value_and_grad_with_retries if retries else ls.value_and_grad

    def loss_fn(model):
        return jnp.mean(jnp.square(model(X).astype(jnp.float32)))

    fun = make(loss_fn, optimizer, value_and_grad=nnx.value_and_grad)
    for _ in range(10):
        _, grads, *_ = fun(model)
        optimizer.update(model, grads)
    assert ls.was_applied(optimizer)
    assert ls.get_loss_scale(optimizer) < 2.0**18


def test_flax_without_pytree_has_objects(monkeypatch):
    """As Flax 0.10."""
    kinds = {"Object": nnx.Pytree, "Variable": nnx.Variable}
    old = types.SimpleNamespace(**kinds, update_context=nnx.update_context)
    monkeypatch.setitem(sys.modules, "flax.nnx", old)
    state = ls.DynamicLossScale().init()
    loss, *_ = ls.value_and_grad_with_retries(lambda w: jnp.sum(w**2), state)(X[0])
    assert loss == jnp.sum(X[0] ** 2)
