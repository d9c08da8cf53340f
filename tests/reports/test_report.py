"""autocast_report: each product, its line, its size, and what autocast makes of it."""

import collections
import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from float32_losses import MODELS, by_hand, own_jvp, own_vjp, products_of
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from shared import slow_but
from training import normal

import optax_lossscale as ls

X, LAYERS = normal(4, 8), normal(5, 8, 8)
LARGEST = np.abs(X).max().item()
QUARTER = np.float32(np.eye(8) / 4)
report = ls.autocast_report


def test_product_has_its_numbers_and_its_line():
    def loss_fn(w, x):
        y = x @ w
        return jnp.sum(y @ w)

    first, second = report(loss_fn, 2 * np.eye(8, dtype=np.float32), x=X)
    assert first.largest == (LARGEST, 2.0, 2 * LARGEST)
    assert second.largest == (2 * LARGEST, 2.0, 4 * LARGEST)
    assert first.operands == "float32[4, 8], float32[8, 8]" and first.times == 1
    number = loss_fn.__code__.co_firstlineno + 1
    assert first.line == f"test_report.py:{number} (loss_fn)"
    assert second.line == f"test_report.py:{number + 1} (loss_fn)"


by_row = jax.custom_batching.sequential_vmap(jnp.matmul)


def scanned(product):
    def body(x, w):
        return jnp.tanh(product(x, w)), None

    return lambda x: jax.lax.scan(body, x, LAYERS)[0]


LOOPS = {
    "scan": scanned(jnp.matmul),
    "checkpoint in scan": scanned(jax.jit(jax.checkpoint(jnp.matmul))),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x @ LAYERS[0], x),
    "while_loop": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ LAYERS[0])), (0, x)
    ),
    "scan in one of two branches": lambda x: jax.lax.cond(
        x[0, 0] > 1e9, lambda x: x @ LAYERS[0], scanned(jnp.matmul), x
    ),
}


@pytest.mark.parametrize("fun", LOOPS.values(), ids=LOOPS)
def test_product_in_a_loop_is_counted_each_time_that_it_runs(fun):
    [row] = report(fun, X)
    assert row.times == 5 and not row.left


def test_products_of_one_line_share_a_row_with_their_largest_numbers():
    [row] = report(lambda x: [w * x @ x.T for w in (1, 2, 8, 2, 4)], X)
    assert row.times == 5 and row.largest[:2] == (8 * LARGEST, LARGEST)


def test_debug_nans_and_disable_jit_do_not_disturb_a_report():
    with jax.debug_nans(True), jax.disable_jit():
        [row] = found = report(lambda x: LOOPS["scan"](jnp.log(-jnp.abs(x))), X)
    assert row.times == 5 and not row.fits and "NAN" in repr(found)


def test_product_that_is_left_has_a_reason():
    products = [
        ("precision", lambda x: jnp.matmul(x, x.T, precision="highest")),
        ("own derivative", lambda x: own_jvp(x, x.T)),
        ("own derivative", lambda x: own_vjp(x, x.T)),
        ("own batch rule", lambda x: by_row(x, x.T)),
        ("no matmul", lambda x: jnp.vdot(x, x)),
        ("fewer than 8", lambda x: x[:, :3] @ x[:3]),
        ("bfloat16", lambda x: by_hand(jnp.matmul, "bfloat16")(x, x.T)),
        ("int32", lambda x: x.astype(int) @ x.T.astype(int)),
    ]
    rows = report(lambda x: [product(x) for _, product in products], X)
    assert [row.left for row in rows] == [reason for reason, _ in products]


LEFT = {
    "own derivative": own_vjp,
    "fewer than 8": lambda x, w: x[:, :3] @ w[:3],
    "precision": functools.partial(jnp.matmul, precision="highest"),
}


@pytest.mark.parametrize("reason", LEFT)
def test_derivative_of_a_product_that_is_left_is_left_for_the_same_reason(reason):
    """Though its own shapes are others, and no function is around it any more."""

    def loss_fn(w, x):
        return jnp.sum(jnp.sin(LEFT[reason](jnp.sin(x @ w), w)))

    cast, *rows = report(jax.grad(ls.autocast(loss_fn, "float16")), LAYERS[0], X[:3])
    assert not cast.left and "float16" in cast.operands
    left = {x.left for x in rows if "float16" not in x.operands}
    assert left == {reason}
    assert any(x.left and x.line.endswith(", backward") for x in rows)


def test_product_in_float16_already_is_not_left():
    [row] = report(by_hand(jnp.matmul), X, X.T)
    assert not row.left and row.operands == "float16[4, 8], float16[8, 4]"


def test_integers_have_their_largest_number():
    [row] = report(lambda x: x @ x.T, x=jnp.full((4, 8), -3))
    assert row.largest == (3.0, 3.0, 72.0)


def layer(x):
    return jnp.sin(x @ LAYERS[0])


def test_layers_of_one_line_have_rows_with_their_scopes():
    def two_layers(x):
        with jax.named_scope("attention"):
            x = layer(x)
            with jax.named_scope("mlp"):
                return jnp.sum(jax.vmap(layer)(x))

    found = report(jax.grad(two_layers), X)
    assert len({x.line.removesuffix(", backward") for x in found}) == 1
    assert {x.scope for x in found} == {"attention", "attention/mlp"}
    assert "  attention/mlp  " in repr(found)


def layers_in_a_loop(x):
    return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]


in_scope = jax.named_scope("attention")
SCOPED = {
    "checkpoint in a scope": in_scope(jax.checkpoint(layer)),
    "checkpoint around a scope": jax.checkpoint(in_scope(layer)),
    "loop in a scope": in_scope(layers_in_a_loop),
}


@pytest.mark.parametrize("fun", SCOPED.values(), ids=SCOPED)
def test_both_passes_have_the_scope(fun):
    found = report(jax.grad(lambda x: jnp.sum(fun(x))), X)
    passes = {(x.line.endswith(", backward"), x.scope) for x in found}
    assert passes == {(False, "attention"), (True, "attention")}


def test_product_of_a_library_has_the_users_line_or_else_its_own():
    """First no line of the user calls it. Then it is not traced again."""
    model = nn.Dense(8, use_bias=False)
    params, apply = {"params": {"kernel": LAYERS[0]}}, jax.jit(model.apply)
    [row], [called] = report(apply, params, X), report(lambda *x: apply(*x), params, X)
    assert "(Dense.__call__)" in row.line
    assert called.line.startswith("test_report.py:") and "<lambda>" in called.line


@pytest.mark.parametrize("package", [ls, jax])
def test_product_has_its_line_in_a_folder_whose_name_begins_like_a_package(package):
    """It stands beside the folder of the package."""
    file, names = f"{Path(package.__file__).parent}_models/model.py", {}
    exec(compile("product = lambda x, w: x @ w", file, "exec"), names)
    [row] = report(names["product"], X, LAYERS[0])
    assert row.line == "model.py:1 (<lambda>)"


@pytest.mark.parametrize(("largest", "fits"), [(2.0**-25, False), (2.0**-24, True)])
def test_product_fits_if_its_largest_operand_does_not_round_to_zero(largest, fits):
    """Its results are float32."""
    [row] = report(jnp.matmul, 1e-5 * X.T, np.full_like(X, largest))
    assert row.fits == fits


@pytest.fixture(scope="module")
def of_all_kinds():
    def fun(x):
        large, small = 1e5 * x, 1e-9 * x
        fine = jnp.sum(x @ x.T)
        left = jnp.matmul(large, x.T, precision="highest")
        bad = small @ x.T, large @ x.T, large @ small.T
        return fine + jnp.sum(left) + sum(map(jnp.sum, bad))

    return report(fun, X)


def test_products_that_float16_cannot_hold_come_first(of_all_kinds):
    under, over, both, fine, left = of_all_kinds
    assert not under.fits and 0 < under.largest[0] < 3e-8
    assert not over.fits and over.largest[0] > 65504 and not both.fits
    assert fine.fits and left.left == "precision"


def test_table_says_what_float16_does_to_each_product(of_all_kinds):
    lines = repr(of_all_kinds).splitlines()
    assert lines[0] == "5 matmuls and convolutions, 4 in float16, 3 beyond its range"
    words = ["UNDER", "OVERFLOWS", "OVERFLOWS, UNDERFLOWS", "yes", "no: precision"]
    assert all(word in line for word, line in zip(words, lines[2:], strict=True))


def test_cast_product_keeps_its_line_and_its_scope():
    def scoped(w, x):
        with jax.named_scope("attention"):
            return jnp.sum(x @ w)

    [row] = report(ls.autocast(scoped, "float16"), LAYERS[0], X)
    assert row.operands.startswith("float16") and row.scope == "attention"
    assert row.line.startswith("test_report.py") and "(scoped)" in row.line


GRADIENTS = {
    "grad": ls.grad,
    "retries": ls.value_and_grad_with_retries,
    "scale_backward": lambda fun, state: jax.grad(ls.scale_backward(fun, state)),
    "scale_block": lambda fun, state: jax.grad(ls.scale_block(fun)),
}


def square(w, x):
    return jnp.mean((x @ w) ** 2)


def by_passes(name, scale):
    """The row of the forward pass, and that of the backward pass."""
    gradient = GRADIENTS[name](
        ls.autocast(square, "float16"), ls.FixedLossScale(scale).init()
    )
    rows = report(gradient, LAYERS[0], X)
    assert all(x.operands.startswith("float16") and not x.left for x in rows)
    return sorted(rows, key=lambda row: row.line.endswith(", backward"))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_function_has_both_passes_at_the_scale_of_its_state(name):
    """A block chooses its own scale."""
    forward, backward = by_passes(name, 2.0**20)
    assert forward.fits and backward.fits == (name == "scale_block")


def test_backward_pass_fits_at_a_scale_that_is_not_too_large():
    assert all(row.fits for row in by_passes("grad", 8.0))


def test_products_among_other_equations_are_counted():
    """Beside lookups, random numbers and a solver. Those inside of it are left out."""

    def loss_fn(w, labels):
        rows = (w[labels] @ w).at[0].set(1.0)
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, rows.shape)
        solved = jax.lax.custom_linear_solve(
            lambda x: 4.0 * x, rows, lambda _, b: b @ QUARTER, symmetric=True
        )
        logits = jnp.where(kept, rows, solved) @ w
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    args = LAYERS[0], np.arange(8)
    assert [x.times for x in report(loss_fn, *args)] == [1, 1]
    gradient = jax.grad(lambda *args: jnp.mean(ls.autocast(loss_fn, "float16")(*args)))
    assert sum(x.times for x in report(gradient, *args)) == 2 + 4  # two passes


def test_module_of_nnx_is_measured_and_does_not_change():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
    before = jax.tree.leaves(nnx.state(model))
    [row] = report(lambda model, x: jnp.mean(model(1e6 * x) ** 2), model, X)
    assert not row.fits
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))


FIRST_SCOPES = {
    "haiku": "linear",
    "linen": "Model/Dense_0",
    "equinox": "eqx.nn.MLP/eqx.nn.Linear",
}


@pytest.mark.parametrize("name", slow_but(["haiku"], MODELS))
def test_products_of_a_model_are_counted_and_the_first_has_its_path(name):
    params, loss_fn = MODELS[name]()
    rows = report(loss_fn, params)
    assert sum(x.times for x in rows) == products_of(loss_fn, params)["float32"]
    assert rows[0].scope == FIRST_SCOPES[name]


@pytest.mark.parametrize("checks", [False, True])
def test_product_in_shard_map_is_measured_on_each_device(checks):
    def summed(x, w):
        return jax.lax.psum(x @ w, "d")

    specs = {"in_specs": (P(None, "d"), P("d")), "out_specs": P()}
    mapped = jax.shard_map(summed, mesh=make_mesh(d=2), **specs)
    with jax.enable_checks(checks):
        [row] = report(mapped, normal(4, 16), normal(16, 8))
    assert (row.times, row.operands) == (2, "float32[4, 8], float32[8, 8]")


def by_parameter(fun, *args):
    """How often the parameters are operands, in the forward and the backward pass."""
    counts = collections.Counter()
    for x in report(jax.grad(fun), *args):
        counts[x.parameter, x.line.endswith(", backward")] += x.times
    return counts


AROUND = {
    "nothing": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda fun: jax.vmap(fun, (None, 0)),
    "scan": lambda fun: (
        lambda w, x: jax.lax.scan(lambda x, _: (fun(w, x), None), x, length=1)[0]
    ),
    "cond": lambda fun: lambda w, x: jax.lax.cond(x[0, 0] < 9, fun, fun, w, x),
    "own derivative": lambda fun: lambda w, x: own_vjp(fun(w, x), jnp.tanh(x.T @ x)),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_product_is_named_by_its_parameter_in_both_passes(around):
    """Through casts, moves and calls. Layers that share a program are told apart."""
    apply = around(lambda w, x: jnp.sin(jnp.cos(x) @ w["kernel"].T.astype("float32")))

    def fun(params, x):
        return jnp.mean(apply(params["b"], apply(params["a"], x) @ params["mid"]))

    params = {"a": {"kernel": LAYERS[0]}, "b": {"kernel": LAYERS[1]}, "mid": LAYERS[2]}
    counts = by_parameter(fun, params, X)
    paths = {"a/kernel", "mid", "b/kernel"}
    named = {x: count for x, count in counts.items() if x[0]}
    assert {*named} == {(path, backward) for path in paths for backward in (0, 1)}
    assert all(counts[path, False] == 1 for path in paths)


def test_stacked_layers_are_named_by_their_stack():
    def fun(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, params["layers"])
        return jnp.mean(x @ params["embed"].T)

    counts = by_parameter(fun, {"layers": LAYERS, "embed": LAYERS[0]}, X)
    forward, backward = ({x: n for x, n in counts.items() if x[1] == y} for y in (0, 1))
    assert forward == {("layers", False): 5, ("embed", False): 1}
    assert backward == {("layers", True): 10, ("embed", True): 2}


def test_product_of_two_activations_has_no_parameter():
    """Even if both of them meet parameters in other products."""

    def attention(params, x):
        q, k = (jnp.sin(x @ params[name]) for name in "qk")
        scores = q @ k.T
        return jnp.mean(jax.nn.softmax(scores) @ jnp.sin(q) @ params["out"])

    rows = report(jax.grad(attention), dict.fromkeys(("q", "k", "out"), LAYERS[0]), X)
    assert {x.parameter for x in rows} == {"q", "k", "k, q", "out", ""}
    lines = {
        (x.name, x.line.removesuffix(", backward")) for x in rows if not x.parameter
    }
    assert len(lines) == 2 and all(name == line for name, line in lines)


ORDERS = {
    "w": (lambda x, params: x @ params["w"], (X, {"w": LAYERS[0]}), {}),
    "params": (lambda params, x: x @ params, (LAYERS[0], X), {}),
    "b/0": (lambda *, b, a: b[0] @ a["x"].T, (), {"b": [X], "a": {"x": X}}),
    "argument 1/0": (lambda *args: args[0] @ args[1][0], (X, [LAYERS[0]]), {}),
}


@pytest.mark.parametrize("name", ORDERS)
def test_parameter_is_in_a_tree_or_else_the_first_argument(name):
    fun, args, kwargs = ORDERS[name]
    assert report(fun, *args, **kwargs)[0].name == name


def in_turn(params, x):
    for w in params.values():
        x = jnp.sin(x @ w)
    return x


def test_equal_layers_share_a_row_but_those_that_overflow_are_named():
    params = {f"block_{i}": LAYERS[i % 5] for i in range(12)}
    params["block_7"] = 1e6 * LAYERS[2]
    bad, others = found = report(in_turn, params, X)
    assert not bad.fits and bad.name == "block_7" and bad.times == 1
    assert others.name == "block_*" and others.times == 11
    assert "  block_7  " in repr(found)
    # Of more than 3, the first has its own row.
    first, rest, others = report(
        in_turn, {x: w * 1e6 for x, w in params.items()} | {"block_1": LAYERS[0]}, X
    )
    assert (first.name, rest.name, others.name) == ("block_0", "block_*", "block_1")
    assert rest.times == 10


def test_few_numbered_neighbors_have_their_own_names():
    names = [f"blocks/{i}/{w}" for i in range(5) for w in ("wi_0", "wi_1", "conv1d_2")]
    rows = report(in_turn, dict.fromkeys(names, LAYERS[0]), X)
    assert [x.name.removeprefix("blocks/*/") for x in rows] == [
        "conv1d_2",
        "wi_0",
        "wi_1",
    ]


def of_scaled_loss(fun):
    state = ls.FixedLossScale(1.0).init()
    return ls.grad(fun, state, value_and_grad=nnx.value_and_grad)


def with_a_state(fun):
    graph = nnx.graphdef(sequential())
    return jax.grad(lambda state, x: fun(nnx.merge(graph, state), x))


def sequential():
    return nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2)))


@pytest.mark.parametrize("gradient", [nnx.grad, of_scaled_loss, with_a_state])
def test_parameters_of_a_module_have_their_paths(gradient):
    model = nnx.state(sequential()) if gradient is with_a_state else sequential()
    rows = report(gradient(lambda model, x: jnp.mean(model(x) ** 2)), model, X)
    # Only the second layer has a gradient of its input.
    assert {x.parameter for x in rows} == {"layers/*/kernel", "layers/1/kernel"}


def test_slice_of_a_report_is_a_report(of_all_kinds):
    first = of_all_kinds[:2]
    assert isinstance(first, ls.AutocastReport) and first == tuple(of_all_kinds)[:2]
    assert repr(first).startswith("2 matmuls and convolutions")


def test_complex_nan_is_the_largest_value():
    """Also with a sign, which jax 0.12 gives to its magnitude."""
    x = np.full((8, 8), complex(1, -np.nan), np.complex64)
    [row] = report(lambda x: x @ x, x)
    assert np.isnan(row.largest).all()
