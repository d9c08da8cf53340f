"""autocast_report(errors=True): how much the results change if one line is rounded."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float32_losses import BLOCKS, PRODUCTS, highest, jit_that_rounds, own_vjp, plain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, set_mesh
from shared import slow_but
from training import normal

import optax_lossscale as ls

X, W = normal(8, 8), normal(8, 8, seed=1)
STATE = ls.FixedLossScale(1.0).init()
report = functools.partial(ls.autocast_report, errors=True)


def errors(rows):
    """Of the lines, without products that stay in float32."""
    return {x.line: (x.float16_error, x.bfloat16_error) for x in rows if not x.left}


def costs(x, y):
    return x @ y


def cumulative_sum(product, w):
    """Whose differences are exponentiated, as in Mamba-2."""
    total = product(jnp.tri(256), -jax.nn.softplus(normal(256, 8) @ w))
    return jnp.exp(-((total[1:] - total[:-1]) ** 2))


def state_of_many_steps(product, w):
    matrix = jnp.eye(8) - 1e-3 * w
    return jax.lax.fori_loop(0, 250, lambda _, h: product(h, matrix), X)


def squared_distances(product, w):
    x = X @ w + 30
    norms = jnp.sum(x**2, 1)
    return jnp.exp(-(norms[:, None] + norms - 2 * product(x, x.T)) / 20)


def fourier_features(product, w):
    return jnp.sin(product(100 * X, w))


def lookup_of_class_numbers(product, w):
    numbers = product(
        jax.nn.one_hot(jnp.arange(8), 8), 137.3 * jnp.arange(8.0)[:, None]
    )
    return jnp.sin(numbers) * (X @ w)


def counts(product, w):
    """Of the tokens of each expert, for a router's balance."""
    chosen = jax.nn.one_hot(np.random.default_rng(0).integers(0, 8, 40_001), 8)
    load = product(jnp.ones(len(chosen)), chosen)
    return jax.nn.softmax(X @ w) * (load - load.mean())


def router(product, w):
    """Whose close numbers change places."""
    logits = product(normal(4096, 8), w)
    chosen = logits == jnp.max(logits, 1, keepdims=True)
    outputs = 30 * normal(4096, 8, seed=2)
    return jnp.where(chosen, jax.nn.softmax(logits) * outputs, 0)


COSTLY = {
    fun.__name__: fun
    for fun in (
        cumulative_sum,
        state_of_many_steps,
        squared_distances,
        fourier_features,
        lookup_of_class_numbers,
        counts,
        router,
    )
}
QUICK = ["fourier_features"]


@pytest.mark.parametrize("name", slow_but(QUICK, COSTLY))
def test_line_that_costs_accuracy_comes_first_and_highest_cures_it(name):
    def loss_fn(product, w):
        return jnp.mean(COSTLY[name](product, w)) + jnp.mean(jnp.tanh(X @ w))

    def measured(product):
        return report(ls.grad(functools.partial(loss_fn, product), STATE), W)

    [(line, first), *_] = errors(measured(costs)).items()
    assert "(costs)" in line
    cured = np.max([*errors(measured(highest)).values()], axis=0)
    assert (first > 3 * cured).all()


def beside(left):
    return lambda x, w: costs(x, w) + jnp.sin(left(x, w))


ONE_LINE = {
    **{name: functools.partial(fun, plain) for name, fun in PRODUCTS.items()},
    **{name: around(lambda x, w: jnp.cos(x @ w)) for name, around in BLOCKS.items()},
    "sums of 4 in the backward pass": lambda x, w: jnp.tanh(x[:4] @ w),
    "sums of 1 in the backward pass": lambda x, w: jnp.tanh(x[0] @ w),
    "beside sums of 3": beside(lambda x, w: x[:, :3] @ w[:3]),
    "beside an own derivative": beside(own_vjp),
}
# Two lines, two types, digits lost elsewhere, and sums that an old XLA rounds on a CPU.
for name in ("attention with a mask", "one operand in float16"):
    del ONE_LINE[name]
for name in ("logarithm of a small difference", "convolution", "grouped convolution"):
    del ONE_LINE[name]
QUICK = "scan", "beside an own derivative"


@pytest.mark.parametrize("name", slow_but(QUICK, ONE_LINE))
def test_errors_of_a_line_are_the_changes_that_autocast_makes(name):
    """In both passes."""

    def loss_fn(w, x):
        return jnp.mean(jnp.cos(ONE_LINE[name](x, w)))

    def gradient(fun):
        return ls.grad(fun, STATE, argnums=(0, 1))

    @jit_that_rounds
    def gradients(*args):
        casts = (
            loss_fn,
            ls.autocast(loss_fn, "float16"),
            ls.autocast(loss_fn, jnp.bfloat16),
        )
        return [jnp.stack(gradient(fun)(*args)) for fun in casts]

    exact, *cast = gradients(W, X)
    changes = [jnp.linalg.norm(x - exact) / jnp.linalg.norm(exact) for x in cast]
    found = errors(report(gradient(loss_fn), W, X))
    assert len(found) == 2  # with its backward pass
    for of_pass in found.values():
        np.testing.assert_allclose(of_pass, changes, 0.02)


OTHERS = {
    "while_loop": lambda x, w: jax.lax.while_loop(
        lambda carry: jnp.all(carry[1] == 0),
        lambda c: (costs(c[0], w), c[1] + 1),
        (x, 0),
    ),
    "convolution": functools.partial(PRODUCTS["convolution"], plain),
}


@pytest.mark.parametrize("name", OTHERS)
def test_product_is_rounded(name):
    [(float16, bfloat16)] = errors(report(OTHERS[name], X, W)).values()
    assert 1e-4 < float16 < 1e-3 < bfloat16 < 1e-2


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_errors_on_a_mesh_are_those_on_one_device(axis_type):
    mesh = make_mesh(axis_type, d=8)
    sharded = jax.device_put(X, NamedSharding(mesh, P("d")))
    with set_mesh(mesh):
        [found] = errors(report(costs, sharded, W)).values()
    [expected] = errors(report(costs, X, W)).values()
    assert found == pytest.approx(expected, 1e-3)


class Linen(nn.Module):
    def features(self, x):
        return jnp.sin(nn.Dense(8)(100 * x))

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(self.features(x))


class NNX(nnx.Module):
    def __init__(self):
        self.first, self.last = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))

    def features(self, x):
        return jnp.sin(self.first(100 * x))

    def __call__(self, x):
        return self.last(self.features(x))


def test_line_of_a_linen_module_comes_first():
    params = Linen().init(jax.random.key(0), X)
    gradient = ls.grad(lambda params: jnp.mean(Linen().apply(params, X) ** 2), STATE)
    assert "(Linen.features)" in report(gradient, params)[0].line


def test_line_of_an_nnx_module_comes_first():
    gradient = ls.grad(
        lambda model: jnp.mean(model(X) ** 2), STATE, value_and_grad=nnx.value_and_grad
    )
    assert "(NNX.features)" in report(gradient, NNX())[0].line


@pytest.mark.parametrize("ordered", [False, True])
def test_what_prints_prints_once(ordered, capfd):
    def step(x, _):
        jax.debug.print("printed", ordered=ordered)
        return costs(x, W), None

    report(lambda x: jax.lax.scan(step, x, length=3)[0], X)
    assert capfd.readouterr().out.count("printed") == 3


def test_only_products_that_are_cast_have_errors_and_the_table_shows_them():
    def fun(x):
        return costs(x, W), jnp.vdot(x, x)

    cast, left = found = report(fun, X)
    assert None not in (cast.float16_error, cast.bfloat16_error)
    assert left.float16_error is left.bfloat16_error is None
    without = ls.autocast_report(fun, X)
    assert without[0] == cast._replace(float16_error=None, bfloat16_error=None)
    header, row = repr(found).splitlines()[1:3]
    assert "  float16 error  bfloat16 error  " in header
    assert f"  {cast.bfloat16_error:.2%}  " in row
    assert "float16 error" not in repr(without) and "%" not in repr(without)


def test_overflow_is_an_infinite_error_and_infinities_of_float32_are_left_out():
    def fun(x):
        return 1e5 * costs(x, W), jnp.full(8, -jnp.inf)

    [row] = report(fun, 1e5 * jnp.abs(X))
    assert row.float16_error == np.inf and 0 < row.bfloat16_error < 0.01


def test_layers_of_a_library_are_measured_separately():
    """They have one line, of the user."""
    model = nn.Sequential([nn.Dense(8), lambda x: jnp.sin(100 * x), nn.Dense(8)])
    params = model.init(jax.random.key(0), X)
    gradient = ls.grad(lambda params: jnp.mean(model.apply(params, X) ** 2), STATE)
    rows = report(gradient, params)
    assert len({x.line.removesuffix(", backward") for x in rows}) == 1
    found = {(x.name, x.float16_error) for x in rows}
    (first, most), (last, least) = sorted(found)  # both passes have one error
    assert (first, last) == ("params/layers_0/kernel", "params/layers_2/kernel")
    assert most > 10 * least


def forward_rows(layers):
    def loss_fn(params):
        x = X
        for w in params["layers"]:
            x = x + costs(jnp.sin(x), w)
        return jnp.mean(jnp.cos(x))

    rows = report(ls.grad(loss_fn, STATE), {"layers": layers})
    return [x for x in rows if "backward" not in x.line]


@pytest.mark.slow
def test_equal_layers_share_an_error_but_one_that_makes_half_of_it_has_its_own():
    layers = [W / 100] * 12
    [row] = forward_rows(layers)
    assert row.name == "layers/*" and row.times == 12
    layers[7] = 100 * W
    first, rest = forward_rows(layers)
    assert first.name == "layers/7" and first.times == 1
    assert rest.name == "layers/*" and rest.times == 11
    assert first.bfloat16_error > 2 * rest.bfloat16_error


@pytest.mark.slow
def test_layers_that_all_overflow_share_two_rows():
    first, rest = forward_rows([1e5 * W] * 12)
    assert first.float16_error == rest.float16_error == np.inf
    assert (first.name, rest.name) == ("layers/0", "layers/*")
