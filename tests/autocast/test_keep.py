"""autocast(keep=...): matmuls that stay in float32, by their names in a report."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float32_losses import own_vjp, products_of
from shared import slow_but
from training import normal

import optax_lossscale as ls

X = normal(4, 8)
LAYERS = [{"w": normal(8, 8, seed=i), "out": normal(8, 8, seed=9)} for i in range(3)]
PARAMS = {"layers": LAYERS, "router": normal(8, 8, seed=5)}
STATE = ls.FixedLossScale(1.0).init()
report = ls.autocast_report


def layer(w, x):
    return jnp.tanh(x @ w["w"]) @ w["out"]


def loss_fn(params, x, layer=layer):
    for w in params["layers"]:
        x = layer(w, x)
    with jax.named_scope("routing"):
        return jnp.mean(jnp.cos(x @ params["router"]))


def kept(fun, keep, *args):
    """The names of the parameters whose products stay in float32, in both passes."""
    rows = report(jax.grad(ls.autocast(fun, "float16", keep=keep)), *args)
    assert all(("float32" in x.operands) == (x.left == "precision") for x in rows)
    return {x.parameter for x in rows if x.left}


NAMES = {
    "router": {"router"},
    "layers/1": {"layers/1/w", "layers/1/out"},
    "layers/1/w": {"layers/1/w"},
    "w": {"layers/*/w"},
    "layers/*/w": {"layers/*/w"},
    "l*s/1/w": {"layers/1/w"},
    "layers/1/w, router": {"layers/1/w", "router"},
    "routing": {"router"},
}


QUICK = "router", "layers/*/w", "layers/1/w, router"


@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_name_keeps_products_by_a_part_of_their_path(name):
    assert kept(loss_fn, [name], PARAMS, X) == NAMES[name]


def test_line_and_name_of_a_row_keep_its_products():
    rows = report(jax.grad(loss_fn), PARAMS, X)
    routers = [row for row in rows if row.parameter == "router"]
    lines = {row.line for row in routers}
    for name in {"router", *lines, *(line.partition(" ")[0] for line in lines)}:
        assert kept(loss_fn, [name], PARAMS, X) == {"router"}
    assert {row.name for row in routers} == {"router"}
    cast = ls.autocast(loss_fn, "float16", keep=[row.name for row in rows])
    assert products_of(jax.grad(cast), PARAMS, X).keys() == {"float32"}


AROUND = {
    "jit": jax.jit,
    "checkpoint of a jit": lambda fun: jax.checkpoint(jax.jit(fun)),
    "vmap": lambda fun: jax.vmap(fun, (None, 0)),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_equal_layers_of_one_program_are_told_apart(around):
    shared = around(layer)

    def fun(params, x):
        return loss_fn(params, x, shared)

    assert kept(fun, ["layers/1"], PARAMS, X) == {"layers/1/w", "layers/1/out"}


def test_kept_products_have_the_gradients_of_float32():
    exact = jax.grad(loss_fn)(PARAMS, X)
    cast = jax.grad(ls.autocast(loss_fn, "float16", keep=["layers", "router"]))
    jax.tree.map(np.testing.assert_array_equal, cast(PARAMS, X), exact)


def test_layers_of_a_scan_are_named_by_their_stack():
    def fun(params, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
        return jnp.mean(jnp.cos(x @ params["router"]))

    params = {**PARAMS, "layers": jax.tree.map(lambda *x: jnp.stack(x), *LAYERS)}
    assert kept(fun, ["layers/w"], params, X) == {"layers/w"}


def test_layer_of_an_nnx_module_is_kept():
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)))
    cast = ls.autocast(
        lambda model, x: jnp.mean(model(x)), "float16", keep=["layers/1"]
    )
    rows = report(nnx.grad(cast), model, X)
    assert {x.parameter for x in rows if x.left} == {"layers/1/kernel"}


def test_scope_of_a_linen_module_is_kept():
    model = nn.Sequential([nn.Dense(8, use_bias=False)] * 2)
    params = model.init(jax.random.key(0), X)
    cast = ls.autocast(model.apply, jnp.float16, keep=["Sequential/layers_0"])
    assert products_of(cast, params, X) == {"float32": 2}  # a shared layer


def test_parameter_that_only_the_training_uses_is_not_refused():
    cast = ls.autocast(lambda params, x: layer(params["layers"][0], x), "float16")
    assert products_of(cast, PARAMS, X) == {"float16": 2}
    for name in ("router", "layers/2/w"):
        evaluation = ls.autocast(
            lambda params, x: layer(params["layers"][0], x), "float16", keep=[name]
        )
        assert products_of(evaluation, PARAMS, X) == {"float16": 2}


def test_product_beside_an_own_derivative_is_kept():
    cast = ls.autocast(lambda w, x: own_vjp(x @ w["a"], w["b"]), "float16", keep=["a"])
    assert products_of(cast, {"a": LAYERS[0]["w"], "b": X.T @ X}, X) == {"float32": 2}


def test_kept_program_is_compiled_once():
    jitted = jax.jit(layer)
    cast = ls.autocast(
        lambda params, x: [jitted(w, x) for w in params["layers"]],
        "float16",
        keep=["layers/1"],
    )

    def programs():
        eqns = jax.make_jaxpr(cast)(PARAMS, X).jaxpr.eqns
        return [x.params["jaxpr"] for x in eqns if "jaxpr" in x.params]

    first, second = programs(), programs()
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert first[0] is first[2] and first[0] is not first[1]


def test_first_row_of_the_errors_is_kept_and_the_error_falls():
    def fun(w, x):
        x = jnp.sin(100 * x @ w["frequencies"])
        return jnp.mean(jnp.cos(layer(w["layer"], x)))

    w = {"frequencies": normal(8, 8), "layer": LAYERS[0]}
    gradient = ls.grad(fun, STATE)
    first, *_ = report(gradient, w, X, errors=True)
    assert first.name == "frequencies" and first.float16_error > 0.05
    cast = ls.autocast(fun, "float16", keep=[first.name])
    after = ls.grad(cast, ls.FixedLossScale(2.0**10).init())
    exact, new = (
        jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(f(w, X)))])
        for f in (gradient, after)
    )
    assert jnp.linalg.norm(new - exact) < 0.01 * jnp.linalg.norm(exact)
