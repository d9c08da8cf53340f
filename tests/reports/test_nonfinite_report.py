"""nonfinite_report: the operations that make NaN and inf, however it is called."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from shared import slow_but
from training import normal

import optax_lossscale as ls

X = normal(4, 8)
BAD = X.copy()
BAD[1, 2] = np.nan
W = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}
LARGE = {**W, "b": 3e4 * np.ones((8, 8), np.float32)}
ADAM = ls.with_loss_scaling(optax.adam(1e-3))
GUARD = ls.skip_nonfinite(optax.adam(1e-3), check_updates=True)
HIGH = ls.FixedLossScale(2.0**24).init()
report = ls.nonfinite_report


def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


narrow = ls.autocast(loss_fn, "float16")


@jax.jit
def step(w, state, x):
    loss, grads = ls.value_and_grad(narrow, state)(w, x)
    updates, state = ADAM.update(grads, state, w, value=loss)
    return optax.apply_updates(w, updates), state


def norm_of_zero(w):
    return jnp.linalg.norm(w)


def backward_scan(x):
    return jax.lax.scan(divided, 1.0, x, reverse=True)[0]


def divided(carry, x):
    return carry / x, carry


def by_scan(x):
    return jax.lax.scan(divided, 1.0, x)[0]


def by_scans(x):
    return jax.lax.map(by_scan, x)


def with_roots(x):
    def layer(carry, row):
        return carry + jnp.sqrt(jnp.sum((carry * row) ** 2)), None

    return jnp.sum(jax.lax.scan(layer, jnp.ones(3), x)[0])


def by_while(x):
    return jax.lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] / (3 - c[0])), (0, x)
    )[1]


def in_branches(x):
    return jax.lax.cond(x > 0, lambda x: jnp.log(x - 1), lambda x: x, x)


def one_of_many(x):
    return jax.vmap(lambda x: jnp.sum(x) / jnp.max(x))(x)


def mapped(x):
    return jax.shard_map(
        lambda x: jnp.log(x - 1), mesh=make_mesh(d=2), in_specs=P("d"), out_specs=P("d")
    )(x)


@jax.custom_vjp
def with_rule(x):
    return jnp.abs(x)


with_rule.defvjp(lambda x: (jnp.abs(x), x), lambda x, g: (g * x / jnp.abs(x),))

ONES, ROWS = jnp.ones(8), jnp.ones((9, 3)).at[5].set(0)
OFF = jnp.ones(9).at[5].set(0)
CALLS = {
    "loss, float16": (narrow, (LARGE, X), "dot_general", "b"),
    "gradient": (jax.grad(norm_of_zero), (jnp.zeros(3),), "div", ""),
    "scaled gradient": (ls.grad(narrow, HIGH), (W, X), "convert_element_type", ""),
    "skipped step": (step, (LARGE, ADAM.init(LARGE), X), "dot_general", "b"),
    "update": (
        ADAM.update,
        ({"w": BAD}, ADAM.init({"w": X}), {"w": X}),
        "argument",
        "",
    ),
    "check_updates": (
        lambda g, s: GUARD.update(g, s, g),
        (jnp.full(3, 1e20), GUARD.init(jnp.ones(3))),
        "integer_pow|square|mul",
        "",
    ),
    "batch": (loss_fn, (W, BAD), "argument", ""),
    "closed over": (
        lambda x: x @ BAD.T + jnp.float32(BAD).T[0, 0],
        (X,),
        "constant",
        "",
    ),
    "constant": (lambda x: x + jnp.nan, (X,), "constant nan", ""),
    "masked row": (
        lambda x: jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf)),
        (X,),
        "constant -inf",
        "",
    ),
    "scan": (by_scan, (OFF,), "div", ""),
    "gradient of a scan": (jax.grad(with_roots), (ROWS,), "div|mul", ""),
    "while": (by_while, (jnp.float32(1),), "div", ""),
    "cond": (in_branches, (jnp.float32(1),), "log", ""),
    "vmap": (one_of_many, (jnp.zeros((4, 3)),), "div", ""),
    "shard_map": (mapped, (ONES,), "log", ""),
    "custom_vjp": (jax.grad(lambda x: with_rule(x)[0]), (jnp.zeros(3),), "div", ""),
    "callback without operands": (
        lambda: jax.pure_callback(
            lambda: np.float32(np.nan), jax.ShapeDtypeStruct((), np.float32)
        ),
        (),
        "pure_callback",
        "",
    ),
    "label": (
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.full(4, -100)),
        (X,),
        "gather",
        "",
    ),
}


COSTLY = "gradient of a scan", "check_updates", "scaled gradient", "shard_map"


@pytest.mark.parametrize("name", slow_but(CALLS.keys() - COSTLY, CALLS))
def test_first_row_is_the_operation(name):
    fun, args, names, parameter = CALLS[name]
    row = report(fun, *args)[0]
    assert row.operation in names.split("|")
    assert row.parameter == parameter


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def models():
    two = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2)]
    two[1].kernel[...] *= 4e4
    yield (
        nnx.grad(ls.autocast(nnx_loss, "float16")),
        nnx.Sequential(*two),
        "layers/1/kernel",
    )
    linen = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    params = linen.init(jax.random.key(0), X)["params"]
    params["layers_1"]["kernel"] *= 4e4
    of_linen = ls.autocast(
        lambda p, x: jnp.mean(linen.apply({"params": p}, x) ** 2), "float16"
    )
    yield jax.grad(of_linen), params, "layers_1/kernel"
    layers = [eqx.nn.Linear(8, 8, key=jax.random.key(i)) for i in range(2)]
    layers[1] = eqx.tree_at(lambda x: x.weight, layers[1], 4e4 * layers[1].weight)
    net = eqx.nn.Sequential(layers)
    of_equinox = ls.autocast(lambda net, x: jnp.mean(jax.vmap(net)(x) ** 2), "float16")
    yield eqx.filter_grad(of_equinox), net, "layers/1/weight"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=["NNX", "Linen", "Equinox"])
def test_layer_of_a_model_is_named_by_its_parameter(number):
    gradient, model, parameter = [*models()][number]
    row = report(gradient, model, 30 * X)[0]
    assert (row.operation, row.parameter) == ("dot_general", parameter)
    assert row.note == "float32 holds it" and not row.is_backward


def masked_attention(w, x):
    scores = x @ w["a"] @ x.T
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape)) > 0, scores, -jnp.inf)
    return jnp.mean((jax.nn.softmax(scores) @ x @ w["b"]) ** 2)


def padded(w, x):
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0) @ w["a"])


def best_of(w, x):
    loss = masked_attention(w, x)
    return loss, jnp.minimum(loss, jnp.inf)


HEALTHY = {
    "loss": loss_fn,
    "mask": jax.grad(masked_attention),
    "padding": jax.value_and_grad(padded),
    "best loss": best_of,
    "step": lambda w, x: step(w, ADAM.init(w), x),
    "cast mask": jax.grad(ls.autocast(masked_attention, "float16")),
}


@pytest.mark.parametrize("fun", HEALTHY.values(), ids=HEALTHY)
def test_healthy_program_has_no_row(fun):
    assert report(fun, W, X) == ()
    assert "No NaN or inf" in repr(report(fun, W, X))


def test_mask_beside_an_overflow_has_no_row():
    rows = report(ls.autocast(masked_attention, "float16"), LARGE, X)
    assert [(x.operation, x.parameter) for x in rows] == [("dot_general", "b")]


ITERATIONS = {
    "scan": (by_scan, OFF, "5"),
    "scan, reverse": (
        lambda x: jax.lax.scan(divided, 1.0, x, reverse=True)[0],
        OFF,
        "5",
    ),
    "gradient": (jax.grad(with_roots), ROWS, "5"),
    "while": (by_while, jnp.float32(1), "3"),
    "nested": (
        lambda x: jax.lax.map(by_scan, x),
        jnp.ones((3, 4)).at[2, 1].set(0),
        "2, 1",
    ),
}


@pytest.mark.parametrize(("fun", "x", "iteration"), ITERATIONS.values(), ids=ITERATIONS)
def test_row_has_the_first_iteration(fun, x, iteration):
    assert report(fun, x)[0].iteration == iteration


def test_row_says_what_the_operation_got_and_where():
    def fun(x, y):
        with jax.named_scope("ratio"):
            return jnp.log(x / y)

    [row] = report(fun, np.float32([1, 2, 3]), np.float32([1, 0, 0]))
    assert row.values == "2 / 0 = inf at [1], 2 of 3"
    assert row.line.startswith("test_nonfinite_report.py:")
    assert row.line.endswith("(fun)") and row.scope == "ratio"
    assert "div at test_nonfinite_report.py" in repr(report(fun, X, 0 * X))


def test_row_of_an_argument_has_its_path_and_counts():
    [row] = report(lambda w, *, batch: batch["x"] @ w, X.T, batch={"x": BAD})
    assert row.line == "batch, ['x']" and "1 nan" in row.values


def test_inf_that_becomes_nan_is_told():
    [row] = report(lambda x: jnp.exp(x) - jnp.exp(x + 1), jnp.full(2, 100.0))[:1]
    assert row.operation == "exp" and "inf - inf = nan" in row.becomes_nan


def test_part_of_a_report_is_a_report():
    rows = report(lambda x: (jnp.log(x), 1 / x), jnp.zeros(2))
    assert len(rows) == 2 and repr(rows[:1]).startswith("1 origin of NaN and inf")


def test_iterations_of_a_long_loop_are_seen_once():
    """Those with NaN and inf at the same places as one before."""
    xs = jnp.zeros(400)
    assert len(report(lambda x: jax.lax.scan(divided, 1.0, x), xs)) == 1


def sines(x):
    return jnp.sinh(jnp.sin(jnp.cos(jnp.cosh(jnp.atan(jnp.tanh(jnp.exp(x)))))))


def test_operations_without_a_birth_compile_as_one(caplog):
    """And those of equal layers only once."""
    w = np.ones((7, 7), np.float32)
    with jax.log_compiles():
        rows = report(lambda x: jnp.log(sines(sines(sines(x) @ w) @ w) @ w - 1e4), w)
    compiled = caplog.text.count("Finished XLA compilation")
    assert [x.operation for x in rows] == ["log"] and compiled < 10
