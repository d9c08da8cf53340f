"""autocast_report: each product, its line, its size, and what autocast makes of it."""

import functools

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from float32_losses import by_hand, haiku, own_jvp, own_vjp
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from training import normal

import optax_lossscale as ls

X, LAYERS = normal(4, 8), normal(5, 8, 8)
report = ls.autocast_report


def test_each_product_has_its_numbers_and_its_line():
    def loss_fn(w, x):
        y = x @ w
        return jnp.sum(y @ w)

    first, second = report(loss_fn, 2 * np.eye(8, dtype=np.float32), X)
    largest = np.abs(X).max().item()
    assert first.largest == (largest, 2.0, 2 * largest)
    assert second.largest == (2 * largest, 2.0, 4 * largest)
    assert first.operands == "float32[4, 8], float32[8, 8]" and first.times == 1
    number = loss_fn.__code__.co_firstlineno + 1
    assert first.line == f"test_report.py:{number} (loss_fn)"
    assert second.line == f"test_report.py:{number + 1} (loss_fn)"


LOOPS = {
    "scan": lambda x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, LAYERS)[0],
    "fori": lambda x: jax.lax.fori_loop(0, 5, lambda i, x: x @ LAYERS[0], x),
    "while": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ LAYERS[0])), (0, x)
    )[1],
    "jit in scan": lambda x: jax.lax.scan(
        lambda x, w: (jax.jit(jax.checkpoint(jnp.matmul))(x, w), None), x, LAYERS
    )[0],
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_products_in_loops_are_counted(loop):
    assert [(x.times, x.left) for x in report(loop, X)] == [(5, "")]


def test_of_branches_only_those_that_run_are_there():
    def fun(x):
        return jax.lax.cond(x[0, 0] > 1e9, lambda x: x @ x.T, lambda x: x[:, :4], x)

    assert report(fun, X) == ()


REASONS = {
    "precision": lambda x: jnp.matmul(x, x.T, precision="highest"),
    "own derivative": lambda x: own_jvp(x, x.T) + own_vjp(x, x.T),
    "own batch rule": lambda x: jax.custom_batching.sequential_vmap(jnp.matmul)(x, x.T),
    "no matrix product": lambda x: jnp.vdot(x, x),
    "fewer than 8": lambda x: x[:, :3] @ x[:3],
    "bfloat16": lambda x: x.astype("bfloat16") @ x.T.astype("bfloat16"),
    "": lambda x: by_hand(jnp.matmul)(x, x.T),
}


@pytest.mark.parametrize(("reason", "fun"), REASONS.items())
def test_a_product_that_is_left_has_a_reason(reason, fun):
    found = report(lambda x: jnp.sum(fun(x).astype(jnp.float32)), X)
    assert {x.left for x in found} == {reason}


def test_rows_of_one_line_have_their_largest_numbers():
    def fun(x):
        return [factor * x @ x.T for factor in (1, 4, 2)]

    [row] = report(fun, X)
    assert row.times == 3
    assert row.largest[0] == 4 * row.largest[1] == 4 * np.abs(X).max()


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, _=None):
        return linen.Dense(8, name="b")(linen.Dense(8, name="a")(x)), None


def scanned_linen(x):
    scan = linen.scan(
        linen.remat(Linen), variable_axes={"params": 0}, split_rngs={"params": True}
    )
    model = scan()
    params = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype),
        jax.eval_shape(model.init, jax.random.key(0), x, np.zeros(3)),
    )
    return model.apply(params, x, np.zeros(3))[0]


def scoped(x):
    def layer(x):
        return x @ LAYERS[0]

    with jax.named_scope("attention"):
        x = layer(x)
        with jax.named_scope("mlp"):
            return jax.vmap(layer)(x)


@pytest.mark.parametrize(
    ("fun", "scopes"),
    [
        (scanned_linen, {"Linen/a", "Linen/b"}),
        (scoped, {"attention", "attention/mlp"}),
    ],
)
def test_layers_of_one_line_are_told_by_their_scopes(fun, scopes):
    found = report(jax.grad(lambda x: jnp.sum(fun(x))), X)
    assert {x.scope for x in found} == scopes
    assert all(scope in repr(found) for scope in scopes)
    assert len({x.line.removesuffix(", backward") for x in found}) == 1


def test_product_without_a_line_of_the_user_has_a_row():
    model = linen.Dense(8, precision="highest")
    params = model.init(jax.random.key(0), X)
    [row] = report(model.apply, params, X)
    assert (row.line, row.left) == ("?", "precision")


def test_what_float16_cannot_hold_comes_first():
    def fun(x):
        large, small = 1e5 * x, 1e-9 * x
        fine = jnp.sum(x @ x.T)
        left = jnp.matmul(large, x.T, precision="highest")
        return fine + jnp.sum(left) + jnp.sum(small @ x.T) + jnp.sum(large @ x.T)

    under, over, fine, left = found = report(fun, X)
    assert not under.fits and 0 < under.largest[0] < 3e-8
    assert not over.fits and over.largest[0] > 65504
    assert fine.fits and left.left == "precision"
    lines = repr(found).splitlines()
    assert lines[0] == "4 products, 3 in float16, 2 beyond its range"
    words = ["UNDERFLOWS", "OVERFLOWS", "yes", "no: precision"]
    assert all(word in line for word, line in zip(words, lines[2:], strict=True))


def test_gradient_function_has_the_products_of_the_backward_pass():
    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    w = normal(8, 8)
    numbers = []
    for scale in (8.0, 2.0**20):
        state = ls.DynamicLossScale(scale).init()
        gradient = ls.grad(ls.autocast(loss_fn), state)
        found = {x.line.endswith(", backward"): x for x in report(gradient, w, X)}
        assert found[False].fits and found[False].operands.startswith("float16")
        numbers.append(found[True])
    assert numbers[0].fits and not numbers[1].fits


@pytest.mark.parametrize(
    "gradient",
    [
        lambda fun, state: jax.grad(ls.scale_block(fun)),
        lambda fun, state: jax.grad(ls.scale_backward(fun, state)),
        ls.value_and_grad_with_retries,
    ],
)
def test_products_in_derivatives_of_this_package_are_float16(gradient):
    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    state = ls.DynamicLossScale(8.0).init()
    found = report(gradient(ls.autocast(loss_fn), state), normal(8, 8), X)
    assert [x.left for x in found] == ["", ""]
    assert all(x.operands.startswith("float16") for x in found)


def test_whatever_else_a_program_holds_it_is_measured():
    """The equations of lookups, random numbers and solvers have trees of their own."""

    def loss_fn(w, labels):
        rows = (w[labels] @ w).at[0].set(1.0)
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, rows.shape)
        solved = jnp.linalg.solve(rows + 50 * jnp.eye(8), w)
        logits = jnp.where(kept, rows, solved) @ w
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    w, labels = normal(8, 8), np.arange(8)
    assert [x.left for x in report(loss_fn, w, labels)] == ["", ""]
    gradient = jax.grad(lambda *args: jnp.mean(ls.autocast(loss_fn)(*args)))
    assert sum(x.times for x in report(gradient, w, labels)) >= 5


def test_nan_is_reported_and_loops_are_loops_whatever_is_set():
    def fun(x):
        return LOOPS["scan"](jnp.log(-jnp.abs(x)))

    with jax.debug_nans(True), jax.disable_jit():
        [row] = found = report(fun, X)
    assert row.times == 5 and not row.fits and "NAN" in repr(found)


def test_integers_have_their_largest_number():
    [row] = report(lambda fun: fun @ fun.T, fun=jnp.full((4, 8), -3))
    assert row.largest == (3.0, 3.0, 72.0) and row.left == "int32"


def test_too_large_and_too_small_numbers_are_both_told():
    found = report(lambda x: (1e6 * x) @ (1e-9 * x.T), X)
    assert "OVERFLOWS, UNDERFLOWS" in repr(found)


def model_of_nnx():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(1e6 * x))

    return Model()


def test_module_of_nnx_is_measured_and_does_not_change():
    model = model_of_nnx()
    before = jax.tree.leaves(nnx.state(model))
    [row] = report(lambda model, x: jnp.mean(model(x) ** 2), model, X)
    assert not row.fits and "(Model.__call__)" in row.line
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_models_of_haiku_and_equinox_are_measured():
    params, loss_fn = haiku()
    assert len(report(loss_fn, params)) == 2
    model = eqx.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def of_equinox(arrays, x):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    assert [x.left for x in report(of_equinox, arrays, X)] == ["", "", ""]


@pytest.mark.parametrize("checks", [False, True])
def test_products_in_shard_map_are_measured_on_each_device(checks):
    def summed(x, w):
        return jax.lax.psum(x @ w, "d")

    specs = {"in_specs": (P(None, "d"), P("d")), "out_specs": P()}
    mapped = jax.shard_map(summed, mesh=make_mesh(d=2), **specs)
    with jax.enable_checks(checks):
        [row] = report(mapped, normal(4, 16), normal(16, 8))
    assert (row.times, row.operands) == (2, "float32[4, 8], float32[8, 8]")


def test_traced_arguments_are_refused():
    with pytest.raises(ValueError, match="`args` must hold concrete numbers"):
        jax.eval_shape(functools.partial(report, jnp.matmul), X, X.T)
    with pytest.raises(ValueError, match="`fun` must hold concrete numbers"):
        jax.eval_shape(lambda x: report(lambda w: x @ w, X.T), X)
    with pytest.raises(TypeError, match="`fun` must be a function"):
        report(X)
