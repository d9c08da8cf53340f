"""Modules of Flax NNX, which change in place, in a loop that computes them again."""

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
