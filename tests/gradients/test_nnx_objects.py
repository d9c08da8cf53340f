"""Flax NNX objects, which change in place, in a loop that computes them again."""

import functools
import inspect

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
by_nnx = functools.partial(
    ls.value_and_grad_with_retries, max_retries=20, value_and_grad=nnx.value_and_grad
)
by_retries = functools.partial(ls.value_and_grad_with_retries, state=HIGH)


def steep(x):
    """A loss whose gradients overflow at a scale of 2**10."""
    return 64.0 * jnp.sum(x.astype(jnp.float16)).astype(jnp.float32)


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


def test_nnx_module_changes_once_however_often_repeated():
    results = []
    once = functools.partial(ls.value_and_grad, value_and_grad=nnx.value_and_grad)
    for make, first_scale in ((by_nnx, 2.0**20), (once, 2.0**11)):
        model = Tied(nnx.Rngs(0))
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
        assert model.first is model.second and np.array_equal(model.newest[...], X)
        assert ls.was_applied(optimizer)
        assert float(ls.get_loss_scale(optimizer)) == 2.0**11
        results.append(jax.tree.leaves((result, nnx.state((model, optimizer)))))
    assert_same_bits(*results)


class Changing(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.cache = nnx.Cache(jnp.zeros(3))


def test_a_module_may_change_its_structure():
    def loss_fn(model, x):
        model.eval()
        del model.cache
        model.new = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
        return steep(model.linear(x))

    repeated, once = Changing(), Changing()
    kernel, x = repeated.linear.kernel, np.ones((2, 3), np.float32)
    step = nnx.jit(lambda state, *args: by_nnx(loss_fn, state)(*args))
    _, grads, state = step(HIGH, repeated, x)
    assert ls.all_finite(grads) and ls.get_loss_scale(state) < 2.0**20
    nnx.jit(nnx.value_and_grad(loss_fn))(once, x)
    assert nnx.graphdef(repeated) == nnx.graphdef(once) != nnx.graphdef(Changing())
    assert_same_bits(*(jax.tree.leaves(nnx.state(m)) for m in (repeated, once)))
    assert repeated.linear.kernel is kernel


def test_nnx_arguments_may_share_variables_and_come_back():
    counter = nnx.Variable(jnp.zeros((), jnp.int32))
    model, other = Changing(), Changing()
    model.counter = other.counter = counter
    weight, calls = nnx.Param(jnp.ones(3)), nnx.Variable(jnp.zeros((), jnp.int32))

    def loss_fn(weight, modules, calls):
        calls[...] += 1
        for module in modules:
            module.counter[...] += 1
        new = nnx.Param(2.0 * weight[...])
        return steep(weight[...]), (modules[0], new, "aux")

    fun = by_nnx(loss_fn, HIGH, has_aux=True)
    (_, (same, new, aux)), grad, _ = fun(weight, (model, other), calls)
    assert same is model and aux == "aux"
    assert int(counter[...]) == 2 and int(calls[...]) == 1
    assert np.array_equal(new[...], [2, 2, 2])
    assert np.array_equal(jax.tree.leaves(grad)[0], [64, 64, 64])


@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
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


@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_a_module_whose_changes_jax_would_lose_is_refused(make):
    fun = make(lambda w, models: jnp.zeros(()), HIGH)
    with pytest.raises(TypeError, match="Pass `value_and_grad=nnx.value_and_grad`"):
        fun(X, models=[Changing()])
    linear = nnx.Linear(8, 1, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="Pass `value_and_grad=nnx.value_and_grad`"):
        fun([linear], models=[])
    # One that has nothing but parameters, and is not differentiated, loses nothing.
    beside = make(lambda x, model: jnp.sum(model(x)), HIGH)
    slopes = np.broadcast_to(np.asarray(linear.kernel[...])[:, 0], X.shape)
    assert_same_bits(beside(X, linear)[1], slopes)
    last = make(lambda model, x: jnp.sum(model(x)), HIGH, argnums=-1)
    assert_same_bits(last(linear, X)[1], slopes)


@pytest.mark.parametrize(
    "differentiated",
    [
        lambda loss: nnx.grad(ls.autocast(loss)),
        lambda loss: nnx.grad(ls.scale_backward(loss, 8.0)),
        lambda loss: nnx.grad(functools.partial(ls.scale_block(loss))),
        lambda loss: ls.grad(loss, HIGH, value_and_grad=nnx.value_and_grad),
        lambda loss: by_nnx(loss, HIGH),
    ],
)
def test_bound_method_is_refused_as_by_nnx(differentiated):
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    try:
        nnx.grad(linear.__call__)
    except ValueError:
        with pytest.raises(ValueError, match="does not support bound methods"):
            differentiated(functools.partial(linear.__call__))(X)
    assert ls.autocast(linear.__call__)(X).shape == X.shape
    assert inspect.signature(ls.autocast(linear.__call__)) == inspect.signature(
        linear.__call__
    )


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_the_scale_is_read_from_variables_of_the_new_kinds(kind):
    if not hasattr(nnx, "var_defaults"):
        pytest.skip("this Flax has no such variables")
    tx = ls.with_loss_scaling(optax.sgd(0.01))
    with nnx.var_defaults(**{kind: True}):
        model = nnx.Linear(8, 1, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert float(ls.get_loss_scale(optimizer)) == 2.0**15
    assert bool(ls.was_applied(optimizer))
    assert float(ls.grad(lambda w: w**2, optimizer)(3.0)) == 6.0
    assert float(jax.jit(ls.get_loss_scale)(optimizer)) == 2.0**15


def test_what_jax_differentiates_well_is_accepted():
    graph, params, rest = nnx.split(nnx.Linear(8, 1, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def split_loss(params, rest):
        return steep(nnx.merge(graph, params, rest)(X))

    ours = ls.grad(split_loss, TX.init(params))(params, rest)
    assert jax.tree.structure(ours) == jax.tree.structure(params)


@pytest.mark.parametrize("wrap", [ls.scale_block, by_retries])
def test_changed_arguments_that_are_no_objects_are_refused(wrap):
    def loss_fn(x, seen):
        seen[0] = 2 * x
        return steep(x)

    where = r"`\(args, kwargs\)\[0\]\[1\]\[0\]`"
    with pytest.raises(ValueError, match=f"must not change its .*{where}"):
        wrap(loss_fn)(X, [X])
