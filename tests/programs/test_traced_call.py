"""What functions are given: objects from outside, and trees of their own kind."""

import dataclasses
import functools
import operator
import traceback
from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_types, without_keys
from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs
from shared import enable_x64
from training import normal

import optax_lossscale as ls

X, KEY = jax.device_put(normal(3, 8)), jax.random.wrap_key_data(np.zeros(2, "uint32"))
WRAPPED = {
    "autocast": functools.partial(ls.autocast, dtype="float16"),
    "scale_backward": lambda f: ls.scale_backward(f, 8.0),
    "scale_block": ls.scale_block,
}
# What is around the function; the module is outside of it.
AROUND = {
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "grad": jax.grad,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1],
}
wrapped = pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)


def loss_fn(model, x):
    return jnp.sum(model(x) ** 2)


def held(model):
    return jax.tree.leaves(nnx.state(model))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@wrapped
def test_wrapped_function_reads_a_module_from_outside(wrap, around):
    """NNX forbids to write one there."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = held(model)
    jax.eval_shape(around(lambda x: wrap(loss_fn)(model, x)), X)
    jax.eval_shape(around(wrap(lambda x: loss_fn(model, x))), X)
    assert all(map(operator.is_, before, held(model)))


# Calls of functions that are wrapped. They return what has changed, too.


def module_beside_one_that_changes(wrap):
    norm = nnx.BatchNorm(8, momentum=0.5, rngs=nnx.Rngs(0))
    teacher = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def distance(norm, teacher, x):
        return jnp.mean((norm(teacher(x)) - x) ** 2)

    loss = nnx.jit(lambda norm, x: wrap(distance)(norm, teacher, x))(norm, X)
    return loss, norm.mean[...]


def tree_of_a_module(wrap):
    def split_loss(tree, x):
        norm = nnx.from_tree(tree)
        return loss_fn(norm, x), nnx.to_tree(norm)

    norm = nnx.BatchNorm(8, momentum=0.5, rngs=nnx.Rngs(0))
    loss, tree = wrap(split_loss)(nnx.to_tree(norm), X)
    split_inputs(wrap(merge_inputs(loss_fn)))(norm, X)
    return loss, nnx.from_tree(tree).mean[...], norm.mean[...]


class Kinds(nnx.Module):
    """It has variables of many kinds, and changes some of them."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.table = nnx.Variable(jnp.array(2.0), note=("described",))
        self.tree = nnx.Variable({"numbers": jnp.arange(3)})

    def __call__(self, x):
        return self.dropout(self.norm(x)) * self.table[...]


def variables(state):
    return jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def state_of_nnx_in_a_derivative(wrap):
    """NNX forbids to write it there. A copy of it changes."""
    graph, params, rest = nnx.split(Kinds(), nnx.Param, ...)

    def copied_loss(params, tree, x):
        model = nnx.merge(graph, params, tree["rest"], copy=True)
        loss, new = loss_fn(model, x), nnx.state(model)
        popped = nnx.pop(model, nnx.BatchStat)
        return loss, (tree, tree["rest"]["table"], nnx.to_pure_dict(new), popped)

    def derivative(tree, x):
        fun = jax.value_and_grad(wrap(copied_loss), has_aux=True)
        return fun(params, tree, x)

    tree = {"rest": rest}
    scanned = jax.lax.scan(lambda tree, x: (tree, derivative(tree, x)), tree, X[None])
    mapped = jax.vmap(derivative, in_axes=(None, 0))(tree, X[None])
    return derivative(tree, X), scanned, mapped


def state_of_nnx_that_changes(wrap):
    """Its variables are objects: the function changes those of its caller."""
    graph, state = nnx.split(Kinds())

    def merged_loss(state, x):
        model = nnx.merge(graph, state)
        return loss_fn(model, x), nnx.state(model)

    loss, returned = wrap(merged_loss)(state, X)
    assert all(map(operator.is_, variables(returned), variables(state)))
    return loss, state


def state_of_equinox(wrap):
    """Once it is set, the old one cannot be read."""
    index = eqx.nn.StateIndex(jnp.zeros(8))
    state = eqx.nn.State(index)
    loss, state = wrap(lambda x, state: (x @ x, state.set(index, x)))(X[0], state)
    return loss, state.get(index)


@dataclasses.dataclass
class Positive:
    """It holds a logarithm, and is a tree of its exponential."""

    log: Any


jax.tree_util.register_pytree_node(
    Positive, lambda x: ([jnp.exp(x.log)], None), lambda _, x: Positive(jnp.log(x[0]))
)


def tree_that_computes_its_leaves(wrap):
    def fun(positive, x):
        return jnp.sum(x * positive.log)

    return wrap(fun)(Positive(jnp.float32(0.5)), X)


def layers_of_linen(wrap):
    class Model(nn.Module):
        def setup(self):
            self.second = nn.Dense(8)

        @nn.compact
        @wrap
        def __call__(self, x):
            x = wrap(self.second)(wrap(lambda x: nn.Dense(8)(x))(x))
            x = wrap(nn.BatchNorm(use_running_average=False))(x)
            x = wrap(nn.Dropout(0.5, deterministic=False))(x)
            self.sow("seen", "x", x)
            return wrap(nn.BatchNorm(use_running_average=False))(x)

    keys, changing = {"params": KEY, "dropout": KEY}, ["batch_stats", "seen"]
    variables = Model().init(keys, X)
    return variables, Model().apply(variables, X, rngs=keys, mutable=changing)


def layers_of_haiku(wrap):
    def layers(x):
        norm = hk.BatchNorm(True, True, 0.9)
        x = wrap(hk.Linear(8))(wrap(lambda x: hk.Linear(8)(x))(x))
        for _ in range(2):
            x = wrap(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))(x)
            x = wrap(norm)(x, True)
        return x, jax.random.uniform(hk.next_rng_key())

    model = hk.transform_with_state(layers)
    with hk.config.context(check_jax_usage=True):
        variables = model.init(KEY, X)
        return variables, model.apply(*variables, KEY, X)


CALLS = [
    module_beside_one_that_changes,
    tree_of_a_module,
    state_of_nnx_in_a_derivative,
    state_of_nnx_that_changes,
    state_of_equinox,
    tree_that_computes_its_leaves,
    layers_of_linen,
    layers_of_haiku,
]


@functools.cache
def results(call):
    """With each wrapper and without one, in one program."""
    plain = {"plain": lambda f: f}
    return jax.jit(lambda: {k: call(wrap) for k, wrap in (WRAPPED | plain).items()})()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_function_returns_and_changes_what_the_function_does(name, call):
    ours, theirs = results(call)[name], results(call)["plain"]
    assert_same_types(ours, theirs)
    ours, theirs = without_keys((ours, theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=0.01, atol=0.02)


def test_module_that_cannot_be_written_keeps_what_it_holds():
    norm = nnx.BatchNorm(8, momentum=0.5, rngs=nnx.Rngs(0))
    before = held(norm)
    with pytest.raises(Exception, match="Cannot mutate"):
        jax.jit(lambda x: ls.autocast(loss_fn, "float16")(norm, x))(X)
    assert all(map(operator.is_, before, held(norm)))
    ls.autocast(loss_fn, "float16")(norm, X + 1)
    assert np.all(np.asarray(norm.mean[...]) != 0)


@pytest.mark.parametrize("x64", [False, True])
@wrapped
def test_constant_that_is_returned_is_an_array(wrap, x64):
    def constants(_):
        return jnp.array(True), jnp.asarray(0.5), jnp.asarray(3), jnp.float16(1)

    seen = []
    with enable_x64(x64):
        jax.jit(lambda x: seen.append(wrap(constants)(x)))(X)
        for arrays in (*seen, wrap(constants)(X)):
            assert all(isinstance(x, jax.Array) for x in arrays)
            assert_same_types(arrays, constants(X))


@wrapped
def test_argument_is_not_copied_by_an_eager_derivative(wrap):
    x = jnp.ones((3, 173))
    pullback = jax.vjp(wrap(lambda x: jnp.sum(x * x)), x)[1]
    assert sum(a.shape == x.shape for a in jax.live_arrays()) == 1
    del pullback


def test_arguments_of_numpy_are_cast_too():
    """In float16, 1 + 2**-12 is 1."""
    x, w = np.full((2, 8), 1 + 2.0**-12, np.float32), np.ones((8, 2), np.float32)
    product = ls.autocast(lambda x, w: x @ w, "float16")
    np.testing.assert_array_equal(product(x, w), 8.0)


@wrapped
def test_debug_nans_names_the_operation_and_the_line(wrap):
    def of_negative_numbers(x):
        return jnp.sum(jnp.log(x))

    refused = pytest.raises(FloatingPointError, match=r"\(nan\) encountered in log")
    with jax.debug_nans(True):
        with refused as seen:
            wrap(of_negative_numbers)(-np.abs(X))
        with refused:
            jax.jit(wrap(of_negative_numbers))(-np.abs(X))
    shown = "".join(traceback.format_exception(seen.value))
    assert "jnp.sum(jnp.log(x))" in shown


@wrapped
def test_error_names_the_function_of_the_user(wrap):
    def branching(x):
        return x[0, 0] if jnp.sum(x) > 0 else 0.0

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        wrap(branching)(X)
    assert f"branching at {__file__}" in str(error.value)
    assert "flat at" not in str(error.value)
