"""What functions are given: objects from outside, and trees of their own kind."""

import functools
import traceback

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs
from shared import enable_x64
from training import normal

import optax_lossscale as ls

X = normal(3, 8)
STATE = ls.DynamicLossScale().init()

WRAPPED = {
    "autocast": ls.autocast,
    "scale_backward": lambda f: ls.scale_backward(f, 8.0),
    "scale_block": ls.scale_block,
}
# What is around the function; the module is outside of it.
AROUND = {
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None])[0],
    "grad": lambda f: jax.grad(f)(X),
    "checkpoint": lambda f: jax.checkpoint(f)(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, X[None])[0],
}


def loss_fn(model, x):
    return jnp.sum(model(x) ** 2)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_module_from_outside_may_be_read(wrap, around):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    expected = around(lambda x: loss_fn(model, x))
    for found in (
        around(lambda x: wrap(loss_fn)(model, x)),
        around(wrap(lambda x: loss_fn(model, x))),
    ):
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.01)
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_module_that_cannot_be_written_keeps_what_it_holds():
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(norm))
    with pytest.raises(Exception, match="Cannot mutate"):
        jax.jit(lambda x: ls.autocast(loss_fn)(norm, x))(X)
    after = jax.tree.leaves(nnx.state(norm))
    assert all(a is b for a, b in zip(before, after, strict=True))
    ls.autocast(loss_fn)(norm, X + 1)
    assert np.all(np.asarray(norm.mean[...]) != 0)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_module_that_is_read_beside_one_that_changes_may_be_from_outside(wrap):
    teacher = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def distance(norm, teacher, x):
        return jnp.mean((norm(x) - teacher(x)) ** 2)

    @nnx.jit
    def step(norm, x):
        return wrap(distance)(norm, teacher, x)

    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    assert np.isfinite(step(norm, X + 1)) and np.all(norm.mean[...] != 0)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_tree_of_a_module_stays_a_tree(wrap):
    def split_loss(tree, x):
        norm = nnx.from_tree(tree)
        return loss_fn(norm, x), nnx.to_tree(norm)

    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    _, tree = wrap(split_loss)(nnx.to_tree(norm), X + 1)
    assert np.all(nnx.from_tree(tree).mean[...] != 0)
    split_inputs(wrap(merge_inputs(loss_fn)))(norm, X + 1)
    np.testing.assert_array_equal(norm.mean[...], nnx.from_tree(tree).mean[...])


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_constant_that_is_returned_is_an_array(wrap, x64):
    def constants(_):
        return jnp.array(True), jnp.asarray(0.5), jnp.asarray(3), jnp.float16(1)

    seen = []
    with enable_x64(x64):
        jax.jit(lambda x: seen.append(wrap(constants)(x)))(X)
        for arrays in (*seen, wrap(constants)(X)):
            assert all(isinstance(x, jax.Array) for x in arrays)
            assert [*map(jax.typeof, arrays)] == [*map(jax.typeof, constants(X))]


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_argument_is_not_copied_by_an_eager_derivative(wrap):
    x = jnp.ones((3, 173))
    pullback = jax.vjp(wrap(lambda x: jnp.sum(x * x)), x)[1]
    assert sum(a.shape == x.shape for a in jax.live_arrays()) == 1
    del pullback


def test_arrays_of_numpy_are_computed_in_the_program():
    x, w = np.full((2, 8), 1 + 2.0**-12, np.float32), np.ones((8, 2), np.float32)
    np.testing.assert_array_equal(ls.autocast(lambda x, w: x @ w)(x, w), 8.0)


def linen(wrap):
    class Model(nn.Module):
        def setup(self):
            self.second = nn.Dense(8)

        @nn.compact
        @wrap
        def __call__(self, x):
            return wrap(self.second)(wrap(lambda x: nn.Dense(8)(x))(x))

    return Model()


def haiku(wrap):
    def layers(x):
        return wrap(hk.Linear(8))(wrap(lambda x: hk.Linear(8)(x))(x))

    return hk.without_apply_rng(hk.transform(layers))


def linen_that_changes(wrap):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = wrap(nn.BatchNorm(use_running_average=False))(x)
            x = wrap(nn.Dropout(0.5, deterministic=False))(x)
            self.sow("seen", "x", x)
            return wrap(nn.BatchNorm(use_running_average=False))(x)

    options = dict(rngs={"dropout": jax.random.key(1)}, mutable=["batch_stats", "seen"])
    return hk.Transformed(
        lambda key, x: Model().init({"params": key, "dropout": key}, x),
        functools.partial(Model().apply, **options),
    )


def haiku_that_changes(wrap):
    def layers(x):
        norm = hk.BatchNorm(True, True, 0.9)
        for _ in range(2):
            x = wrap(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))(x)
            x = wrap(norm)(x, True)
        return x, jax.random.uniform(hk.next_rng_key())

    model, key = hk.transform_with_state(layers), jax.random.key(1)
    return hk.Transformed(model.init, lambda both, x: model.apply(*both, key, x))


@pytest.mark.parametrize("make", [linen, haiku, linen_that_changes, haiku_that_changes])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_layers_of_linen_and_haiku_may_be_wrapped(wrap, make):
    """Their parameters are made as without it. They may change statistics and keys."""
    model, plain = make(wrap), make(lambda f: f)
    params = model.init(jax.random.key(0), X)
    expected = jax.jit(plain.init)(jax.random.key(0), X)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), params, expected
    )
    found, expected = (jax.jit(x.apply)(params, X) for x in (model, plain))
    close = functools.partial(np.testing.assert_allclose, atol=0.02)
    jax.tree.map(close, found, expected)


@jax.tree_util.register_pytree_node_class
class Positive:
    """It holds a logarithm, and is a tree of its exponential."""

    def __init__(self, log):
        self.log = log

    def tree_flatten(self):
        return (jnp.exp(self.log),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(jnp.log(children[0]))


def test_tree_may_compute_its_leaves():
    def fun(positive, x):
        return jnp.sum(x * positive.log)

    positive = Positive(jnp.float32(0.5))
    expected = float(fun(positive, X))
    assert float(ls.autocast(fun)(positive, X)) == pytest.approx(expected)
    value, *_ = ls.value_and_grad_with_retries(fun, STATE)(positive, X)
    assert float(value) == pytest.approx(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(w=2 * tree["w"]),
        lambda tree: tree.update(another=tree["w"]),
        lambda tree: tree.pop("w"),
    ],
)
def test_function_that_changes_what_it_is_given_is_refused(change):
    def fun(tree, x):
        change(tree)
        return jnp.sum(x)

    with pytest.raises(ValueError, match="must not change its arguments"):
        ls.autocast(fun)({"w": jnp.asarray(X)}, X)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_debug_nans_names_the_operation_and_the_line(wrap):
    def of_negative_numbers(x):
        return jnp.sum(jnp.log(x))

    refused = pytest.raises(FloatingPointError, match=r"\(nan\) encountered in log")
    with jax.debug_nans(True):
        with refused as seen:
            wrap(of_negative_numbers)(-np.abs(X))
        with refused:
            jax.jit(wrap(of_negative_numbers))(-np.abs(X))
    assert "in of_negative_numbers" in "".join(traceback.format_exception(seen.value))


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_errors_name_the_function_of_the_user(wrap):
    def branching(x):
        return x[0, 0] if jnp.sum(x) > 0 else 0.0

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        wrap(branching)(X)
    assert f"branching at {__file__}" in str(error.value)
    assert "flat at" not in str(error.value)
