"""autocast: the products of any float32 program, and nothing else, in float16.

Random programs are compared with themselves, cast by hand at each product.
"""

import functools
import random

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close_in_float16, assert_same_types, noted
from devices import vary
from flax import nnx
from float32_losses import (
    F16,
    F32,
    OTHERS,
    RUINED,
    STAY_FLOAT32,
    N,
    X,
    by_hand,
    equinox,
    flax_linen,
    haiku,
    loss_of,
    own_jvp,
    plain,
    products,
    products_of,
    ragged,
    random_program,
    squares,
    squares_by_hand,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, on_mesh, set_mesh
from shared import enable_x64, slow_but
from training import normal

import optax_lossscale as ls
from optax_lossscale._programs.rewrite import operations

# Otherwise XLA may leave out the rounding of some results, not of others.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})

PARAMS = {"w": jnp.asarray(normal(N, N, seed=1)), "b": np.zeros(N, np.float32)}


@pytest.mark.parametrize("seed", slow_but(range(1), range(24)))
def test_a_random_program_is_the_one_that_is_cast_by_hand(seed):
    has_jvp = seed % 2 == 0  # a ``custom_vjp`` has none
    others = [name for name in OTHERS if name != "own vjp" or not has_jvp]
    steps, program = random_program(random.Random(seed), others)
    modes = random.Random(seed).choice(["none", "strict", "x64"])
    before = loss_of(program, plain)
    ours, theirs = ls.autocast(before), loss_of(program, by_hand)
    with (
        noted(f"seed {seed}", modes, steps),
        enable_x64(modes == "x64"),
        jax.numpy_dtype_promotion("strict" if modes == "strict" else "standard"),
        jax.numpy_rank_promotion("raise" if modes == "strict" else "allow"),
    ):
        three = jnp.int32(3) if modes == "strict" else 3

        def everything(loss_fn, params, x):
            gradient = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)
            (_, aux), _ = result = gradient(params, x, steps=three)
            aux.pop("name")
            if has_jvp:
                forward = jax.jvp(lambda x: loss_fn(params, x)[0], (x,), (x,))
                return result, forward
            return result, jax.vmap(lambda x: loss_fn(params, x)[0])(jnp.stack([x, -x]))

        def traced(loss_fn):
            return jit(functools.partial(everything, loss_fn)).trace(PARAMS, X)

        both = [traced(f) for f in (ours, theirs)]
        assert_same_types(*(x.out_info for x in (both[0], traced(before))))
        counts = [products(x.jaxpr.jaxpr) for x in both]
        assert counts[0] == counts[1]
        results = [x.lower().compile()(PARAMS, X) for x in both]
        if "scan" in operations(both[0].jaxpr):
            # XLA fuses its body otherwise, and some numbers round to others in float16.
            jax.tree.map(assert_close_in_float16, *results)
        else:
            jax.tree.map(np.testing.assert_array_equal, *results)


CAST = ls.autocast(squares)


def on_an_explicit_mesh(f, params, x):
    mesh = make_mesh(EXPLICIT, d=2)
    with set_mesh(mesh):
        args = jax.device_put((params, x), NamedSharding(mesh, P()))
        return jax.device_get(jax.jit(jax.value_and_grad(f))(*args))


def in_shard_map(f, params, x):
    def local(params, x):
        loss, grads = jax.value_and_grad(f)(vary(params, "d"), x)
        return jax.lax.pmean((loss, grads), "d")

    mapped = on_mesh(local, (P(), P("d")), P(), make_mesh(d=2))
    return mapped(params, np.tile(x, (2, 1)))


def donated(f, params, x):
    grad = jax.jit(jax.grad(f), donate_argnums=0)
    return grad(jax.tree.map(jnp.copy, params), x)


TRANSFORMED = {
    "hessian": lambda f, p, x: jax.hessian(lambda s: f(p, s * x))(1.0),
    "gradient of a gradient": lambda f, p, x: jax.grad(
        lambda p: optax.tree.norm(jax.grad(f)(p, x), squared=True)
    )(p),
    "linearize": lambda f, p, x: jax.linearize(lambda x: f(p, x), x)[1](x),
    "vmap of grad": lambda f, p, x: jax.vmap(jax.grad(f), (None, 0))(
        p, jnp.stack([x, -x])
    ),
    "scale_backward": lambda f, p, x: jax.grad(ls.scale_backward(f, 8.0))(p, x),
    "scale_block": lambda f, p, x: jax.grad(ls.scale_block(f))(p, x),
}
COMPILED = {name: jit(fun, static_argnums=0) for name, fun in TRANSFORMED.items()}
COMPILED |= {
    "donation": donated,
    "explicit mesh": on_an_explicit_mesh,
    "shard_map around it": in_shard_map,
}


# The slow ones differentiate or vectorize what others do, too.
@pytest.mark.parametrize(
    "name", slow_but(COMPILED.keys() - {"hessian", "vmap of grad"}, COMPILED)
)
def test_what_transforms_functions_takes_it_like_any_other(name):
    ours, theirs = (COMPILED[name](f, PARAMS, X) for f in (CAST, squares_by_hand))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_mixture_of_experts_is_cast():
    experts = jnp.stack([X, 0.5 * X, -X])

    def gradient(cast, product):
        def loss(x, experts):
            return jnp.mean(jnp.tanh(product(x, experts)) ** 2)

        return jit(jax.value_and_grad(cast(loss), (0, 1)))(X, experts)

    assert products_of(ls.autocast(ragged), X, experts) == {"float16": 1}
    ours, theirs = gradient(ls.autocast, ragged), gradient(plain, by_hand(ragged))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_it_may_be_around_a_shard_map():
    def run(f, cast=lambda f: f):
        def mean(params, x):
            mapped = jax.shard_map(
                lambda params, x: jax.lax.pmean(f(params, x), "d"),
                mesh=make_mesh(d=2),
                in_specs=(P(), P("d")),
                out_specs=P(),
            )
            return mapped(params, x)

        return jax.jit(jax.value_and_grad(cast(mean)))(PARAMS, np.tile(X, (2, 1)))

    ours, theirs = run(squares, ls.autocast), run(squares_by_hand)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_step_is_traced_once_and_retries_take_it():
    tx = ls.with_loss_scaling(optax.adam(1e-3), ls.DynamicLossScale(2.0**24))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        loss, grads, state = ls.value_and_grad_with_retries(CAST, state)(params, X)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    assert ls.was_applied(state) and float(ls.get_loss_scale(state)) < 2.0**24


def test_scopes_and_lines_stay_in_the_program():
    def scoped(w, x):
        with jax.named_scope("attention"):
            return jnp.sum(x @ w)

    text = jax.jit(ls.autocast(scoped)).lower(X, X).as_text(debug_info=True)
    assert "attention/dot_general" in text and "test_autocast.py" in text


def test_it_is_a_decorator_and_keeps_the_name():
    @ls.autocast
    def loss_fn(x):
        """Its docstring."""
        return jnp.sum(x @ x)

    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss_fn", "Its docstring.")
    assert products_of(loss_fn, X) == {"float16": 1}
    half = functools.partial(ls.autocast, dtype="bfloat16")(jax.jit(jnp.matmul))
    assert products_of(half, X, X) == {"bfloat16": 1}


@pytest.mark.parametrize(
    ("fun", "dtype", "error", "message"),
    [
        (1, F16, TypeError, "`fun` must be a function, got 1"),
        (jnp.sum, F32, ValueError, "`dtype` must be float16 or bfloat16, got float32"),
        (jnp.sum, jnp.float8_e4m3fn, ValueError, "float8 needs a scale for each"),
        (jnp.sum, jnp.int8, ValueError, "`dtype` must be a floating-point type"),
        (jnp.sum, None, ValueError, "`dtype` must be a floating-point type"),
    ],
)
def test_what_is_no_function_or_no_narrower_type_is_refused(fun, dtype, error, message):
    with pytest.raises(error, match=message):
        ls.autocast(fun, dtype)


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16}])
def test_context_and_decorator_with_options_are_told_the_way_out(options):
    message = "`fun` must be a function, got None.* It is no context: .*"
    with pytest.raises(
        TypeError, match=message + r"functools.partial\(autocast, dtype"
    ):
        ls.autocast(**options)


def test_float16_parameters_multiply_float32_in_float16():
    half = jax.tree.map(lambda p: p.astype(F16), PARAMS)

    def loss_fn(params):
        return jnp.mean((X @ params["w"]) ** 2)

    assert products_of(jax.grad(loss_fn), half)["float32"]
    cast = ls.grad(ls.autocast(loss_fn), ls.DynamicLossScale().init())
    assert set(products_of(cast, half)) == {"float16"}
    chex.assert_trees_all_close(cast(half), cast(PARAMS), atol=1e-3)


def test_bfloat16_with_a_scale_of_1_trains():
    tx = ls.with_loss_scaling(optax.adam(1e-1), ls.FixedLossScale(1.0))
    fun = ls.autocast(squares, jnp.bfloat16)

    @jax.jit
    def step(carry, _):
        params, state = carry
        loss, grads = ls.value_and_grad(fun, state)(params, X)
        updates, state = tx.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), loss

    _, losses = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, length=30)
    losses = np.asarray(losses)
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("make", slow_but([haiku], [flax_linen, haiku, equinox]))
def test_models_have_only_float16_products_in_both_passes(make):
    params, loss_fn = make()
    state = ls.DynamicLossScale().init()

    def theirs(params, state):
        return jax.value_and_grad(loss_fn)(params)

    def ours(params, state):
        return ls.value_and_grad(ls.autocast(loss_fn), state)(params)

    plainly = products_of(theirs, params, state)
    assert products_of(ours, params, state) == {"float16": plainly["float32"]}
    both = jax.jit(lambda *args: (ours(*args), theirs(*args)))(params, state)
    (loss, grads), (expected, slopes) = jax.device_get(both)
    assert abs(loss / expected - 1) < 0.01
    norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(slopes)))
    chex.assert_trees_all_close(grads, slopes, atol=0.02 * norm)


@pytest.mark.parametrize("make", [ls.value_and_grad, ls.value_and_grad_with_retries])
def test_a_module_of_nnx_keeps_its_statistics(make):
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(N, N, rngs=rngs)
            self.norm = nnx.BatchNorm(N, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    def loss_fn(model, x):
        return jnp.mean(jnp.tanh(model(x)) * x)

    means = []
    for fun in (loss_fn, ls.autocast(loss_fn)):
        model, state = Model(), ls.DynamicLossScale().init()
        differentiated = make(fun, state, value_and_grad=nnx.value_and_grad)
        nnx.jit(differentiated)(model, X)
        means.append(np.asarray(model.norm.mean[...]))
    assert means[0].any()
    np.testing.assert_allclose(*means, atol=1e-3)
    assert np.any(means[0] != means[1]), "the product was float16"


def test_a_state_of_equinox_may_be_used_up():
    """Once it is set, the old one cannot be read."""
    linear = eqx.nn.Linear(N, N, key=jax.random.key(0))
    model = eqx.nn.SpectralNorm(linear, "weight", key=jax.random.key(1))

    def loss_fn(model, state):
        y, state = model(X[0], state)
        return jnp.sum(y), state

    @eqx.filter_jit
    def both(model, states):
        fun = eqx.filter_value_and_grad(ls.autocast(loss_fn), has_aux=True)
        return fun(model, states[0])[0][0], loss_fn(model, states[1])[0]

    ours, theirs = both(model, (eqx.nn.State(model), eqx.nn.State(model)))
    assert abs(float(ours) - float(theirs)) < 0.01


@pytest.mark.filterwarnings("ignore:`autocast` casts no matrix product")
@pytest.mark.parametrize("fun", STAY_FLOAT32)
def test_sums_of_products_and_products_of_few_stay_float32(fun):
    found = products_of(jax.value_and_grad(ls.autocast(fun)), X)
    assert found.keys() == {"float32"}
    value, slope = jit(jax.value_and_grad(ls.autocast(fun)))(X)
    assert np.isfinite(value) and np.isfinite(slope).all()


@pytest.mark.parametrize("loss_fn", RUINED)
def test_what_a_cast_in_the_wrong_place_ruins_is_right(loss_fn):
    def in_float32(x):
        return loss_fn(x, F32)

    @jit
    def run(x):
        half = jax.value_and_grad(lambda x: loss_fn(x, F16).astype(F32))(x.astype(F16))
        both = (jax.value_and_grad(f)(x) for f in (ls.autocast(in_float32), in_float32))
        return *both, half

    ours, expected, (value, slope) = jax.device_get(run(np.abs(normal(N, N))))
    chex.assert_trees_all_close(ours, expected, rtol=0.02, atol=1e-4)
    wrong = abs(value / expected[0] - 1) > 0.02
    norms = np.linalg.norm(slope - expected[1]), np.linalg.norm(expected[1])
    assert wrong or norms[0] > 0.02 * norms[1] or not np.isfinite([value, *norms]).all()


def test_a_program_that_changes_what_it_is_given_is_refused():
    def loss_fn(x, seen):
        seen[0] = x
        return jnp.sum(x @ x)

    with pytest.raises(ValueError, match="must not change its arguments"):
        ls.autocast(loss_fn)(X, [X])


# In it, float16 would become float32 under `jax.vmap`.
by_row = jax.custom_batching.sequential_vmap(jnp.matmul)


def in_float64(x):
    return jnp.sum((x.astype("float64") @ x.astype("float64")).astype(F32))


@pytest.mark.parametrize(
    ("fun", "precision", "reason"),
    [
        (lambda x: jnp.sum(x @ x), "highest", "is a precision other than .*default"),
        (lambda x: jnp.sum(x @ x), "tensorfloat32", "is a precision other than"),
        (lambda x: jnp.sum(own_jvp(x, x)), None, "is a function with a derivative"),
        (lambda x: jnp.sum(by_row(x, x)), None, "is a function with a batch rule"),
        (lambda x: jnp.sum(x[:3, :3] @ x[:3, :3]), None, "sums fewer than 8 numbers"),
        (in_float64, None, "is the type float64. Give"),
        (lambda x: jnp.sum(x.astype("bfloat16") @ x), None, "is the type bfloat16"),
    ],
)
def test_a_program_of_which_nothing_is_cast_is_warned_of(fun, precision, reason):
    message = f"casts no matrix product or convolution of `fun`, 0 of 1. .*{reason}"
    with (
        enable_x64(True),
        jax.default_matmul_precision(precision),
        pytest.warns(UserWarning, match=message) as seen,
    ):
        jax.eval_shape(ls.autocast(fun), X)
    assert seen[0].filename == __file__


def test_a_program_without_a_float32_product_is_not_warned_of():
    """Or with one that is cast."""
    by_two = [by_hand(jnp.matmul), ls.scale_block(ls.autocast(jnp.matmul))]
    by_two += [by_hand(functools.partial(jnp.matmul, preferred_element_type=F32))]
    by_two += [jnp.vdot, jnp.linalg.solve]
    for fun in (jnp.tanh, *(lambda x, f=f: f(x, x) for f in by_two)):
        jax.eval_shape(ls.autocast(fun), X)
    jax.eval_shape(ls.autocast(lambda x: own_jvp(x @ x, x)), X)
