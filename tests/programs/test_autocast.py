"""autocast: the products of a float32 program, and nothing else, in float16."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close_in_float16, assert_same_types
from float32_losses import (
    BLOCKS,
    MODELS,
    OTHERS,
    PRODUCTS,
    W,
    X,
    by_hand,
    plain,
    products_of,
    some_products,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, set_mesh
from shared import enable_x64, slow_but

import optax_lossscale as ls
from optax_lossscale._programs.rewrite import operations

# Otherwise XLA may leave out the rounding of some results, not of others.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
STATE = ls.DynamicLossScale().init()
HIGH = ls.DynamicLossScale(2.0**24).init()


def loss_of(fun):
    return lambda x, w: jnp.mean(jnp.square(fun(x, w)))


def two_casts(program, dtype="float16"):
    """The loss of a program, cast by `autocast` and by hand."""
    in_dtype = functools.partial(by_hand, dtype=dtype)
    functions = (functools.partial(program, cast) for cast in (plain, in_dtype))
    before, expected = map(loss_of, functions)
    return ls.autocast(before, dtype), expected


def inside(block, program):
    return lambda cast, *xw: block(functools.partial(program, cast))(*xw)


def all_blocks(cast, x, w):
    for block in BLOCKS.values():
        x = jnp.tanh(block(cast(jnp.matmul))(x, w))
    return x


IN_BLOCKS = {f"in {name}": inside(f, some_products) for name, f in BLOCKS.items()}
NESTED = {f"blocks in {name}": inside(f, all_blocks) for name, f in BLOCKS.items()}
del NESTED["blocks in shard_map"]  # which holds no other
PROGRAMS = PRODUCTS | IN_BLOCKS | NESTED


@pytest.mark.parametrize("name", slow_but([*PRODUCTS, *IN_BLOCKS], PROGRAMS))
def test_products_are_those_that_are_cast_by_hand(name):
    both = [jax.value_and_grad(f, (0, 1)) for f in two_casts(PROGRAMS[name])]
    assert products_of(both[0], X, W) == products_of(both[1], X, W)
    # XLA fuses what a loop computes again otherwise, and rounds it otherwise.
    has_loop = "scan" in name or "while" in name or name in NESTED
    same = assert_close_in_float16 if has_loop else np.testing.assert_array_equal
    jax.tree.map(same, *(jit(f)(X, W) for f in both))


@functools.cache
def gradients_of_others(around):
    """Of all of them, in one program."""

    def gradient(f):
        return jax.value_and_grad(around(loss_of(f)), (0, 1))

    return jit(lambda *xw: {k: gradient(f)(*xw) for k, f in OTHERS.items()})(X, W)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:`autocast` casts no matrix product")
def test_other_operation_stays_float32(name):
    ours, theirs = (gradients_of_others(f)[name] for f in (ls.autocast, plain))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def on_an_explicit_mesh(f):
    mesh = make_mesh(EXPLICIT, d=2)

    def gradient(x, w):
        with set_mesh(mesh):
            args = jax.device_put((x, w), NamedSharding(mesh, P()))
            return jax.device_get(jax.jit(jax.value_and_grad(f))(*args))

    return gradient


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
COMPILED = {
    **{name: lambda f, t=t: jit(t(f)) for name, t in TRANSFORMATIONS.items()},
    "donation": lambda f: (
        lambda x, w: jit(jax.grad(f), donate_argnums=0)(jnp.array(x), w)
    ),
    "explicit mesh": on_an_explicit_mesh,
}


@pytest.mark.parametrize("name", COMPILED)
def test_transformation_takes_a_cast_function(name):
    ours, theirs = (COMPILED[name](f)(X, W) for f in two_casts(some_products))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", ["linearize", "vmap"])
def test_transformation_takes_a_loop(name):
    both = [TRANSFORMATIONS[name](f) for f in two_casts(PROGRAMS["in scan"])]
    assert products_of(both[0], X, W) == products_of(both[1], X, W)
    jax.tree.map(assert_close_in_float16, *(jit(f)(X, W) for f in both))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_precision_keeps_a_product_in_float32_beside_one_that_is_cast(block):
    fun = block(lambda x, w: OTHERS["highest"](jnp.tanh(x @ w), w))
    count = products_of(fun, X, W)["float32"] // 2
    assert products_of(ls.autocast(fun), X, W) == {"float16": count, "float32": count}


def test_bfloat16_products_are_those_that_are_cast_by_hand():
    both = two_casts(some_products, "bfloat16")
    ours, theirs = (jit(jax.value_and_grad(f, (0, 1)))(X, W) for f in both)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("mode", ["standard", "strict", "x64"])
def test_results_keep_their_types(mode):
    """Those of the function and of its gradients, and what is no array."""

    def loss_fn(params, x, *, flag=None, name="a string", steps=3):
        y = x @ params["w"] + params["b"][None]
        aux = {"y": y, "steps": steps, "none": flag, "name": name}
        return jnp.mean(y) * jnp.float32(steps), aux

    def gradient(f):
        steps = jnp.int32(3) if mode == "strict" else 3
        gradient = jax.value_and_grad(f, (0, 1), has_aux=True)
        (loss, aux), grads = gradient({"w": W, "b": W[0]}, X, steps=steps)
        assert aux.pop("name") == "a string" and aux.pop("steps") is steps
        return loss, aux, grads

    with (
        enable_x64(mode == "x64"),
        jax.numpy_dtype_promotion("strict" if mode == "strict" else "standard"),
        jax.numpy_rank_promotion("raise" if mode == "strict" else "allow"),
    ):
        ours, theirs = gradient(ls.autocast(loss_fn)), gradient(loss_fn)
    assert_same_types(ours, theirs)
    chex.assert_trees_all_close(ours, theirs, atol=0.01)


@pytest.mark.parametrize("name", slow_but(["haiku"], MODELS))
def test_models_have_only_float16_products_in_both_passes(name):
    params, loss_fn = MODELS[name]()
    theirs, ours = jax.value_and_grad(loss_fn), ls.autocast(loss_fn)
    ours = ls.value_and_grad(ours, STATE)
    count = products_of(theirs, params)["float32"]
    assert products_of(ours, params) == {"float16": count}
    (loss, grads), (expected, slopes) = jax.jit(lambda p: (ours(p), theirs(p)))(params)
    assert abs(loss / expected - 1) < 0.01
    error = optax.tree.norm(jax.tree.map(jnp.subtract, grads, slopes))
    assert error < 0.02 * optax.tree.norm(slopes)


def test_scopes_and_lines_stay_in_the_program():
    def scoped(w, x):
        with jax.named_scope("attention"):
            return jnp.sum(x @ w)

    text = jax.jit(ls.autocast(scoped)).lower(X, X).as_text(debug_info=True)
    assert "attention/dot_general" in text and "test_autocast.py" in text


def test_decorator_keeps_the_name():
    @ls.autocast
    def loss_fn(x):
        """Its docstring."""
        return jnp.sum(x @ x)

    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss_fn", "Its docstring.")
    assert products_of(loss_fn, X) == {"float16": 1}
    half = functools.partial(ls.autocast, dtype="bfloat16")(jax.jit(jnp.matmul))
    assert products_of(half, X, X) == {"bfloat16": 1}


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.grad])
def test_autocast_adds_only_casts(around):
    def loss(x, w):
        return jnp.sum(x @ w)

    before, after = (around(loss), around(ls.autocast(loss)))
    before, after = (operations(jax.make_jaxpr(f)(X, W)) for f in (before, after))
    assert after - before == {"convert_element_type"}


# In it, float16 would become float32 under `jax.vmap`.
by_row = jax.custom_batching.sequential_vmap(jnp.matmul)


@pytest.mark.parametrize(
    ("fun", "precision", "reason"),
    [
        (jnp.matmul, "highest", "is a precision other than .*default"),
        (jnp.matmul, "tensorfloat32", "is a precision other than"),
        (OTHERS["own jvp"], None, "is a function with a derivative"),
        (by_row, None, "is a function with a batch rule"),
        (OTHERS["few"], None, "sums fewer than 8 numbers"),
        (by_hand(jnp.matmul, "float64"), None, "is the type float64. Give"),
        (by_hand(jnp.matmul, "bfloat16"), None, "is the type bfloat16"),
    ],
)
def test_autocast_warns_if_it_casts_nothing(fun, precision, reason):
    message = f"casts no matrix product or convolution of `fun`, 0 of 1. .*{reason}"
    with (
        enable_x64(True),
        jax.default_matmul_precision(precision),
        pytest.warns(UserWarning, match=message) as seen,
    ):
        jax.eval_shape(ls.autocast(fun), X, W)
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    "fun",
    [
        by_hand(jnp.matmul),
        by_hand(functools.partial(jnp.matmul, preferred_element_type="float32")),
        ls.scale_block(ls.autocast(jnp.matmul)),
        jnp.add,
        jnp.vdot,
        jnp.linalg.solve,
        lambda x, w: OTHERS["own jvp"](x @ w, w),
    ],
)
def test_autocast_does_not_warn_of_a_cast_by_hand_or_no_product(fun):
    jax.eval_shape(ls.autocast(fun), X, W)
