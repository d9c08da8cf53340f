"""scale_backward and scale_block, whose backward passes run at a scale."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import normal

import optax_lossscale as ls

TINY = 2.0**-40  # below the smallest float16: gradients of a loss times it are zero
W, WS, X = normal(4, 4), normal(5, 4, 4), normal(3, 4, seed=1)
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-6 * TINY)
WRAPS = {
    "block": ls.scale_block,
    "backward": functools.partial(ls.scale_backward, scale=2.0**10),
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def layer(w, x, dtype=jnp.float32):
    return jnp.tanh(jnp.dot(x.astype(dtype), w.astype(dtype))).astype(jnp.float32)


def half_loss(w):
    """Without a scale, its gradients are 0."""
    return 2.0**-20 * jnp.mean(layer(w, X, jnp.float16) ** 2)


def test_scale_backward_equals_value_and_grad_bit_for_bit():
    @jax.jit
    def both(w, state):
        scales = {
            "of a state": state,
            "of an array": ls.get_loss_scale(state),
            "of Python": 2.0**15,
            "of NumPy": np.array(2.0**15),  # as `jax.device_get` returns it
        }
        ours = {
            name: jax.value_and_grad(ls.scale_backward(half_loss, scale))(w)
            for name, scale in scales.items()
        }
        return ours, dict.fromkeys(scales, ls.value_and_grad(half_loss, state)(w))

    ours, expected = both(W, ls.with_loss_scaling(optax.sgd(0.1)).init(W))
    assert np.any(expected["of a state"][1])
    assert_same_bits(ours, expected)


def static(w, n, act, *, flag, shape):
    return act(w.reshape(*shape.tolist(), n)) * (2 if flag else 1)


def with_extras(w, key):
    """Outputs of other types, and one that the loss does not depend on."""
    return w**2, key, jnp.arange(3), jnp.sin(w), None, "text"


def twice(wrap, w):
    return 2.0**-20 * wrap(layer)(w, wrap(layer)(w, X))


def scan(f, ws):
    step = jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    return jax.lax.scan(lambda x, w: (step(w, x), None), X, ws)[0]


TREE = {"w": W, "none": None}
STATIC = {"n": 2, "act": jnp.tanh, "flag": True, "shape": np.array([4, -1])}
# Uses, given what is put around a function, and what is differentiated.
USES = {
    "a tree": (lambda wrap, t: wrap(lambda t, x: layer(t["w"], x))(t, x=X), TREE),
    "static arguments": (lambda wrap, w: wrap(static)(w, **STATIC), W),
    "other outputs": (lambda wrap, w: wrap(with_extras)(w, KEY)[0], W),
    "a scan": (lambda wrap, ws: scan(wrap(layer), ws), WS),
    "nested": (lambda wrap, w: wrap(functools.partial(twice, wrap))(w), W),
}


@pytest.mark.parametrize(("use", "inputs"), USES.values(), ids=USES)
def test_wrapped_function_has_the_values_and_gradients_of_the_plain_one(use, inputs):
    def differentiated(wrap, inputs):
        return jax.value_and_grad(lambda x: TINY * jnp.sum(use(wrap, x) ** 2))(inputs)

    @jax.jit
    def all_three(inputs):
        return [differentiated(f, inputs) for f in (*WRAPS.values(), lambda f: f)]

    block, backward, expected = all_three(inputs)
    close(block, expected)
    close(backward, expected)


@functools.partial(jax.jit, static_argnames=("dtype", "headroom"))
def pulled_back(cotangent, **options):
    """The cotangent, and the scale: what is below the key is never divided."""
    place = jax.custom_vjp(lambda x, tree: x)
    key, zeros = "_overwrite_with_gradient", jnp.zeros_like(cotangent)
    place.defvjp(lambda x, tree: (x, None), lambda _, c: (c, {key: c.ravel()[-1]}))
    block = ls.scale_block(lambda x, tree: place(x, tree), **options)
    grads, tree = jax.vjp(block, zeros, {key: jnp.zeros(())})[1](cotangent)
    return grads, tree[key] / cotangent.ravel()[-1]


# A batch of features, and one of numbers.
BATCHES = {
    "(4096, 4), headroom 6": ((4096, 4), 6.0),
    "(4096,), headroom 0.5": ((4096,), 0.5),
}
LARGEST_SCALE = 2.0**126


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "headroom"), BATCHES.values(), ids=BATCHES)
def test_block_scale_leaves_headroom_above_sums_over_the_batch(dtype, shape, headroom):
    """It is the largest such power of 2."""
    bound = float(jnp.finfo(dtype).max) / 2.0**headroom
    for size in (2.0**-60, 1.0, 2.0**60):
        cotangent = np.float32(size) * normal(*shape)
        grads, scale = pulled_back(cotangent, dtype=dtype, headroom=headroom)
        np.testing.assert_array_equal(grads, cotangent)
        largest = np.abs(cotangent).sum(axis=0).max()
        share = float(scale) * largest / bound
        assert share <= 1 and scale <= LARGEST_SCALE
        assert share > 0.5 or scale == LARGEST_SCALE
        assert np.frexp(scale)[0] == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_block_passes_nonfinite_cotangents_at_scale_1(bad):
    cotangent = np.float32([bad, 1e-9])
    grads, scale = pulled_back(cotangent)
    np.testing.assert_array_equal(grads, cotangent)
    assert scale == 1


def test_block_that_is_not_differentiated_costs_nothing():
    programs = [jax.jit(f).lower(W, X) for f in (ls.scale_block(layer), layer)]
    ours, theirs = (program.compile().cost_analysis() for program in programs)
    assert ours == theirs


@every_wrap
def test_float16_at_the_border_warns_where_it_is_differentiated(wrap):
    half, block = W.astype(jnp.float16), wrap(layer)
    gradient = jax.grad(lambda w: jnp.sum(block(w, X.astype(jnp.float16))))
    jax.eval_shape(block, half, X)  # warnings are errors
    jax.eval_shape(gradient, W)
    with pytest.warns(UserWarning, match="takes an array of dtype float16") as warned:
        assert jax.eval_shape(gradient, half).dtype == jnp.float16
    assert warned[0].filename == __file__
    narrow = wrap(lambda w: w.astype(jnp.float16))
    with pytest.warns(UserWarning, match="returns an array of dtype float16"):
        jax.eval_shape(jax.grad(lambda w: jnp.sum(narrow(w))), W)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.filterwarnings("ignore:Gradients may underflow at the border")
def test_wider_block_overflows_no_float16_at_its_border(dtype):
    def gradient(fun, x):
        return jax.grad(lambda x: 2.0**-10 * jnp.sum(fun(x).astype(jnp.float32)))(x)

    def inside(w):
        return layer(w, X, dtype)

    @functools.partial(ls.scale_block, dtype=dtype)
    def narrow(x):
        return x.astype(dtype).astype(jnp.float16)

    @jax.jit
    def gradients(w, x):
        block = ls.scale_block(inside, dtype=dtype)
        return gradient(block, w), gradient(inside, w), gradient(narrow, x)

    inputs, expected, output = gradients(W.astype(jnp.float16), np.float32(1))
    np.testing.assert_allclose(inputs, expected, rtol=2e-2, atol=1e-5)
    assert output == 2.0**-10


MESH = make_mesh(data=8)
BATCH = np.logspace(0, -7, 8, dtype=np.float32)[:, None, None] * np.ones((2, 4))


def normalized(w, x):
    y = layer(w, x)
    return y - jax.lax.pmean(y, "data")


def tiny_gradients(blocks, w, x):
    def gradient(block):
        return jax.grad(lambda w: TINY * jnp.sum(block(w, x) ** 2))(w)

    return list(map(gradient, blocks))


def on_devices(*blocks, check_vma=True):
    """Gradients of what all share, by a batch whose parts differ in size."""

    def gradients(w, x):
        grads = tiny_gradients(blocks, w, x)
        # With `check_vma` jax adds them up.
        return grads if check_vma else jax.lax.psum(grads, "data")

    mapped = on_mesh(gradients, (P(), P("data")), P(), MESH, check_vma=check_vma)
    return mapped(W, BATCH)


def over_members(*blocks):
    gradients = functools.partial(tiny_gradients, blocks)
    return jax.jit(jax.vmap(gradients, (None, 0), axis_name="data"))(W, BATCH)


without_check_vma = functools.partial(on_devices, check_vma=False)
# Where a block runs, and one that needs `axis_name` there.
PLACES = {
    "shard_map": (on_devices, layer, ("data",)),
    "without check_vma": (without_check_vma, normalized, "data"),
    "vmap": (over_members, normalized, ("data",)),
}


@pytest.mark.parametrize(("place", "block", "name"), PLACES.values(), ids=PLACES)
def test_devices_agree_on_a_scale_or_are_refused(place, block, name):
    close(*place(ls.scale_block(block, axis_name=name), block))
    with pytest.raises(ValueError, match=r"`axis_name` must name every.*\['data'\]"):
        place(ls.scale_block(block))


def test_block_that_does_not_communicate_needs_no_axis_name():
    close(*without_check_vma(ls.scale_block(layer), layer))


def test_sums_over_devices_fit():
    @functools.partial(ls.scale_block, headroom=1.0, axis_name="data")
    def block(bias, x):
        return (x.astype(jnp.float16) + bias.astype(jnp.float16)).astype(jnp.float32)

    gradient = jax.grad(lambda bias, x: TINY * jnp.sum(block(bias, x)))
    mapped = on_mesh(gradient, (P(), P("data")), P(), MESH)
    grads = mapped(np.zeros(4), np.zeros((4096, 4)))
    np.testing.assert_array_equal(grads, np.full(4, 4096 * TINY))


@every_wrap
def test_effects_of_debugging_are_kept(wrap):
    def fun(w):
        jax.debug.callback(seen.append, w[0])
        return jnp.sum(w)

    seen = []
    jax.jit(jax.grad(wrap(fun)))(np.ones(2, np.float32))
    jax.effects_barrier()
    assert seen == [1.0]
