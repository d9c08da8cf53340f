"""autocast: the products of a float32 program, and nothing else, in float16."""

import collections
import functools
import gc
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close_in_float16, assert_same_types
from flax import nnx
from float32_losses import (
    BLOCKS,
    MODELS,
    OTHERS,
    PRODUCTS,
    W,
    X,
    by_hand,
    jit_that_rounds,
    plain,
    products_of,
    some_products,
)
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, set_mesh
from shared import enable_x64, slow_but

import optax_lossscale as ls
from optax_lossscale._programs.rewrite import equations

HIGH = ls.DynamicLossScale(2.0**17).init()


def two_casts(program, dtype):
    """The loss of a program, cast by `autocast` and by hand."""

    def loss(cast):
        return lambda x, w: jnp.mean(jnp.square(program(cast, x, w)))

    in_dtype = functools.partial(by_hand, dtype=dtype)
    return ls.autocast(loss(plain), dtype), loss(in_dtype)


gradient = functools.partial(jax.value_and_grad, argnums=(0, 1))


def inside(block, program):
    return lambda cast, *xw: block(functools.partial(program, cast))(*xw)


def all_blocks(cast, x, w):
    for block in BLOCKS.values():
        x = jnp.tanh(block(cast(jnp.matmul))(x, w))
    return x


TRANSFORMATIONS = {
    "gradient of a gradient": lambda f: jax.grad(
        lambda x, w: optax.tree.norm(jax.grad(f)(x, w), squared=True), 1
    ),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, -x]), w),
    "shard_map": lambda f: BLOCKS["shard_map"](jax.grad(f)),
    "scale_backward": lambda f: jax.grad(ls.scale_backward(f, 8.0)),
    "scale_block": lambda f: jax.grad(ls.scale_block(f)),
    "retries": lambda f: ls.value_and_grad_with_retries(f, HIGH),
}


def assert_cast_alike(
    around,
    program,
    assert_same=np.testing.assert_array_equal,
    dtype="float16",
    xw=(X, W),
):
    """Compare a program that is cast by `autocast` with one that is cast by hand."""
    ours, theirs = (jax.jit(around(f)) for f in two_casts(program, dtype))
    assert products_of(ours, *xw) == products_of(theirs, *xw)
    found, expected = jit_that_rounds(lambda *xw: (ours(*xw), theirs(*xw)))(*xw)
    jax.tree.map(assert_same, found, expected)


CASTS = [*((program, "float16") for program in PRODUCTS.values())]
CASTS += [(some_products, "bfloat16")]


@pytest.mark.parametrize(("program", "dtype"), CASTS, ids=[*PRODUCTS, "bfloat16"])
def test_products_are_those_that_are_cast_by_hand(program, dtype):
    assert_cast_alike(gradient, program, dtype=dtype)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_products_in_a_block_are_those_that_are_cast_by_hand(block):
    """XLA fuses recomputed bodies of loops differently, so they round differently."""
    assert_cast_alike(gradient, inside(block, some_products), assert_close_in_float16)


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in BLOCKS if x != "shard_map"])
def test_products_in_nested_blocks_are_those_that_are_cast_by_hand(name):
    nested = inside(BLOCKS[name], all_blocks)
    assert_cast_alike(gradient, nested, assert_close_in_float16)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformed_function_equals_one_that_is_cast_by_hand(name):
    assert_cast_alike(TRANSFORMATIONS[name], some_products)


@pytest.mark.parametrize("name", ["linearize", "vmap"])
def test_transformed_loop_equals_one_that_is_cast_by_hand(name):
    in_scan = inside(BLOCKS["scan"], some_products)
    assert_cast_alike(TRANSFORMATIONS[name], in_scan, assert_close_in_float16)


ON_MESH = {
    "whole": (some_products, P(), P()),
    "rows": (PRODUCTS["product"], P("d"), P()),
    "columns": (PRODUCTS["product"], P(), P(None, "d")),
}


@pytest.mark.parametrize(("program", "x", "w"), ON_MESH.values(), ids=ON_MESH)
def test_cast_function_takes_arrays_of_an_explicit_mesh(program, x, w):
    mesh = make_mesh(EXPLICIT, d=2)
    with set_mesh(mesh):
        xw = jax.device_put((X, W), (NamedSharding(mesh, x), NamedSharding(mesh, w)))
        assert_cast_alike(gradient, program, xw=xw)


def test_eager_gradient_on_a_second_mesh_has_its_devices():
    """The same operations have run on a mesh of the same shape."""
    grad = jax.grad(ls.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), "float16"))
    for devices in (jax.devices(), jax.devices()[::-1]):
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        with set_mesh(mesh):
            place = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
            found = grad(*map(place, (jnp.ones((8, 8)), X)))
        assert [*found.sharding.mesh.devices] == devices


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:`autocast` casts no matmul")
def test_operation_that_is_not_cast_keeps_its_types(name):
    def types(f):
        found = equations(jax.make_jaxpr(gradient(f))(X, W))
        return {x.aval.dtype.name for eqn in found for x in eqn.outvars}

    def loss(x, w):
        return jnp.mean(jnp.square(OTHERS[name](x, w)))

    assert types(ls.autocast(loss, "float16")) == types(loss)


@pytest.mark.parametrize("block", ["jit", "remat in scan", "vmap"])
def test_precision_keeps_a_product_in_float32_beside_one_that_is_cast(block):
    fun = BLOCKS[block](lambda x, w: OTHERS["highest"](jnp.tanh(x @ w), w))
    count = products_of(fun, X, W)["float32"] // 2
    assert products_of(ls.autocast(fun, "float16"), X, W) == {
        "float16": count,
        "float32": count,
    }


@pytest.mark.parametrize("x64", [False, True])
def test_results_keep_their_types(x64):
    """Those of the function and of its gradients, and what is no array."""

    def loss_fn(params, x, *, flag=None, name="a string", steps=3):
        y = x @ params["w"] + params["b"][None]
        return steps * jnp.mean(y), {"y": y, "steps": steps, "none": flag, "name": name}

    def types(f):
        def run(*args):
            (loss, aux), grads = jax.value_and_grad(f, (0, 1), has_aux=True)(*args)
            assert (aux.pop("name"), aux.pop("steps")) == ("a string", 3)
            return loss, aux, grads

        return jax.eval_shape(run, {"w": W, "b": W[0]}, X)

    with (
        enable_x64(x64),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        assert_same_types(types(ls.autocast(loss_fn, "float16")), types(loss_fn))


@pytest.mark.parametrize("name", slow_but(["haiku"], MODELS))
def test_models_have_only_float16_products_in_both_passes(name):
    params, loss_fn = MODELS[name]()
    count = products_of(jax.grad(loss_fn), params)["float32"]
    gradient = ls.grad(ls.autocast(loss_fn, "float16"), HIGH)
    assert products_of(gradient, params) == {"float16": count}


@pytest.mark.parametrize("name", slow_but(["haiku"], MODELS))
def test_gradients_of_models_are_close_to_those_in_float32(name):
    params, loss_fn = MODELS[name]()

    @jax.jit
    def relative_error(params):
        found = ls.grad(ls.autocast(loss_fn, "float16"), HIGH)(params)
        expected = jax.grad(loss_fn)(params)
        off = jax.tree.map(jnp.subtract, found, expected)
        return optax.tree.norm(off) / optax.tree.norm(expected)

    assert relative_error(params) < 0.02


def test_decorator_keeps_the_name_and_the_docstring():
    @functools.partial(ls.autocast, dtype="float16")
    def loss_fn(x):
        """Its docstring."""
        return jnp.sum(x @ x)

    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss_fn", "Its docstring.")


def test_model_of_equinox_stays_a_tree_that_is_trained():
    model = eqx.nn.MLP(8, "scalar", 8, 1, key=jax.random.key(0))

    def loss_fn(model):
        return jnp.sum(jax.vmap(model)(X) ** 2)

    cast, gradient = ls.autocast(model, "float16"), eqx.filter_grad(loss_fn)
    assert products_of(lambda: jax.tree.leaves(gradient(cast)))["float16"] > 0
    ours, theirs = (jax.tree.leaves(gradient(x)) for x in (cast, model))
    chex.assert_trees_all_close(ours, theirs, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("around", [plain, jax.jit, jax.grad])
def test_autocast_adds_only_casts(around):
    def loss(x, w):
        return jnp.sum(x @ w)

    before, after = (
        collections.Counter(
            eqn.primitive.name for eqn in equations(jax.make_jaxpr(around(f))(X, W))
        )
        for f in (loss, ls.autocast(loss, "float16"))
    )
    assert {*(after - before)} == {"convert_element_type"} and not before - after


def test_gradient_takes_less_than_1_6_times_the_python_calls_to_trace():
    """Each operation that occurs again is differentiated once, as in `jax.numpy`."""

    def loss(x, w):
        for _ in range(20):
            x = jax.nn.gelu(x @ w) + jnp.mean(x, axis=-1, keepdims=True)
        return jnp.sum(x)

    def calls(fun):
        events = []
        sys.setprofile(lambda frame, event, _: events.append(event))
        try:
            jax.make_jaxpr(jax.grad(fun))(X, jnp.ones((8, 8)))
        finally:
            sys.setprofile(None)
        return events.count("call")

    plain, ours = calls(loss), calls(ls.autocast(loss, "float16"))
    assert ours < 1.6 * plain, (ours, plain)


@pytest.mark.slow  # later tests trace again
def test_clear_caches_frees_the_programs_that_operations_share():
    x, w = jnp.ones((3, 8)), jnp.ones((8, 173))
    loss = ls.autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w)), "float16")
    jax.make_jaxpr(jax.grad(loss))(x, w)
    del loss

    def programs():
        gc.collect()
        found = [x for x in gc.get_objects() if isinstance(x, Jaxpr)]
        return [x for x in found if (3, 173) in [v.aval.shape for v in x.outvars]]

    assert programs()
    jax.clear_caches()
    assert not programs()


# In it, float16 would become float32 under `jax.vmap`.
by_row = jax.custom_batching.sequential_vmap(jnp.matmul)


NOT_CAST = {
    "highest precision": (jnp.matmul, "highest", "is a precision other than .*default"),
    "TF32": (jnp.matmul, "tensorfloat32", "is a precision other than"),
    "own derivative": (OTHERS["own jvp"], None, "is a function with its own der"),
    "own batch rule": (by_row, None, "is a function with its own batch rule"),
    "few": (OTHERS["few"], None, "sums fewer than 8 numbers"),
    "float64": (by_hand(jnp.matmul, "float64"), None, "is the dtype float64. Give"),
    "bfloat16": (by_hand(jnp.matmul, "bfloat16"), None, "is the dtype bfloat16"),
}


@pytest.mark.parametrize(
    ("fun", "precision", "reason"), NOT_CAST.values(), ids=NOT_CAST
)
def test_autocast_warns_and_says_why_if_it_casts_nothing(fun, precision, reason):
    message = f"casts no matmul or convolution of `fun`, 0 of 1. .*{reason}"
    with (
        enable_x64(True),
        jax.default_matmul_precision(precision),
        pytest.warns(UserWarning, match=message) as seen,
    ):
        jax.eval_shape(ls.autocast(fun, "float16"), X, W)
    assert seen[0].filename == __file__


def test_autocast_without_a_function_is_a_decorator():
    @ls.autocast(dtype="bfloat16")
    def fun(x, w):
        return x @ w

    assert products_of(fun, X, W) == {"bfloat16": 1}


def test_warning_names_every_reason_and_first_those_of_the_users_own_lines():
    """Its setting of the precision helps only where that is set."""
    linear = nnx.Linear(8, 8, precision="highest", rngs=nnx.Rngs(0))

    def fun(x, w):
        return linear(linear(x)), OTHERS["own jvp"](x, w)

    words = "0 of 3. .* for 1 of them, is a function .* for 2 of them, is a precision "
    words += "other than the default, which `fun` asks for. `autocast_report`"
    with pytest.warns(UserWarning, match=words):
        jax.eval_shape(ls.autocast(fun, "float16"), X, W)


to_float32 = functools.partial(jnp.matmul, preferred_element_type="float32")
SILENT = {
    "cast by hand": by_hand(jnp.matmul),
    "cast by hand, with a float32 result": by_hand(to_float32),
    "cast by another autocast": ls.scale_block(ls.autocast(jnp.matmul, "float16")),
    "no product": jnp.add,
    "product of vectors": jnp.vdot,
    "product inside of a solver": jnp.linalg.solve,
    "one product is cast": lambda x, w: OTHERS["own jvp"](x @ w, w),
}


@pytest.mark.parametrize("fun", SILENT.values(), ids=SILENT)
def test_autocast_does_not_warn(fun):
    jax.eval_shape(ls.autocast(fun, "float16"), X, W)
