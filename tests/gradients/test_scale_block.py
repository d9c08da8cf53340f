"""scale_block."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import normal

import optax_lossscale as ls

TINY = 2.0**-40  # what no float16 number is: all gradients of a loss times it are zero
W, WS, X = normal(4, 4), normal(5, 4, 4), normal(3, 4, seed=1)
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
MESH = make_mesh(data=8)
close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-6 * TINY)
by_axis = functools.partial(ls.scale_block, axis_name="data")


def layer(w, x, dtype=jnp.float16):
    return jnp.tanh(jnp.dot(x.astype(dtype), w.astype(dtype))).astype(jnp.float32)


single = functools.partial(layer, dtype=jnp.float32)


def biased(params, x):
    return single(params["w"], x) + params["b"]


def with_extras(w, key):
    """Outputs of other types, and one that the loss does not depend on."""
    return w**2, key, jnp.arange(3), jnp.sin(w), None, "text"


def static(w, n, act, *, flag, shape):
    return act(w.reshape(*shape.tolist(), n)) * (2 if flag else 1)


def scan(f, ws):
    return jax.lax.scan(lambda x, w: (f(w, x), None), X, ws)[0]


def twice(wrap, w):
    return 2.0**-20 * wrap(single)(w, wrap(single)(w, X))


remat = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
TREE = {"w": W, "b": np.ones(4, np.float32), "none": None}
STATIC = {"n": 2, "act": jnp.tanh, "flag": True, "shape": np.array([4, -1])}
# Uses of a block, given what is put around it, and what is differentiated.
USES = {
    "an argument": (lambda wrap, w: wrap(single)(w, X), W),
    "closed over": (lambda wrap, w: wrap(lambda x: single(w, x))(X), W),
    "a tree": (lambda wrap, tree: wrap(biased)(tree, x=X), TREE),
    "static arguments": (lambda wrap, w: wrap(static)(w, **STATIC), W),
    "around vmap": (lambda wrap, w: wrap(jax.vmap(single, (None, 0)))(w, X), W),
    "other outputs": (lambda wrap, w: wrap(with_extras)(w, KEY)[0], W),
    "a scan": (lambda wrap, ws: scan(wrap(single), ws), WS),
    "inside of checkpoint": (lambda wrap, ws: scan(remat(wrap(single)), ws), WS),
    "nested": (lambda wrap, w: wrap(functools.partial(twice, wrap))(w), W),
}


@pytest.mark.parametrize(("use", "inputs"), USES.values(), ids=USES)
def test_values_and_gradients_are_those_of_the_function(use, inputs):
    def loss_fn(wrap, inputs):
        return TINY * jnp.sum(use(wrap, inputs) ** 2)

    def differentiated(inputs):
        both = jax.value_and_grad(loss_fn, argnums=1)
        return both(ls.scale_block, inputs), both(lambda f: f, inputs)

    close(*jax.jit(differentiated)(inputs))


def tiny_gradient(block, w=W, x=X):
    return jax.grad(lambda w: TINY * jnp.sum(block(w, x) ** 2))(w)


def test_sums_over_devices_fit():
    @functools.partial(by_axis, headroom=1.0)
    def block(bias, x):
        return (x.astype(jnp.float16) + bias.astype(jnp.float16)).astype(jnp.float32)

    gradient = jax.grad(lambda bias, x: TINY * jnp.sum(block(bias, x)))
    mapped = on_mesh(gradient, (P(), P("data")), P(), MESH)
    grads = mapped(np.zeros(4), np.zeros((8 * 512, 4)))
    np.testing.assert_array_equal(grads, np.full(4, 8 * 512 * TINY))


@functools.partial(jax.jit, static_argnames=("dtype", "headroom"))
def pulled_back(cotangent, **options):
    """What is below the key is never divided."""
    place = jax.custom_vjp(lambda x, tree: x)
    key, zeros = "_overwrite_with_gradient", jnp.zeros_like(cotangent)
    place.defvjp(lambda x, tree: (x, None), lambda _, c: (c, {key: c.ravel()[-1]}))
    block = ls.scale_block(lambda x, tree: place(x, tree), **options)
    _, pullback = jax.vjp(block, zeros, {key: jnp.zeros(())})
    grads, tree = pullback(cotangent)
    return grads, tree[key]


def scale_of(cotangent, **options):
    """The scale of the last element."""
    grads, scaled = pulled_back(cotangent, **options)
    np.testing.assert_array_equal(grads, cotangent)
    return float(scaled) / cotangent.ravel()[-1]


suggest = jax.jit(
    functools.partial(ls.suggest_loss_scale, min_scale=2.0**-126, max_scale=2.0**126),
    static_argnames=("dtype", "headroom"),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "headroom"), [((4096, 4), 6.0), ((4096,), 0.5)])
def test_the_scale_is_the_one_that_is_suggested(dtype, shape, headroom):
    options = {"dtype": dtype, "headroom": headroom}
    for size in (2.0**-60, 1.0, 2.0**60):
        cotangent = np.float32(size) * normal(*shape)
        expected = suggest(np.abs(cotangent).sum(axis=0), **options).loss_scale
        assert scale_of(cotangent, **options) == float(expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_pass_at_scale_1(bad):
    assert scale_of(np.float32([bad, 1e-9])) == 1


def test_a_block_that_is_not_differentiated_costs_nothing():
    blocks = ls.scale_block(single), single
    programs = [jax.jit(block).lower(W, X).compile() for block in blocks]
    ours, theirs = (program.cost_analysis() for program in programs)
    assert ours == theirs


def test_float16_at_the_border_warns():
    half, x = W.astype(jnp.float16), X.astype(jnp.float16)
    block = ls.scale_block(layer)
    jax.jit(block)(half, x)  # warnings are errors, and this is not differentiated
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(block(w, x))))
    gradient(W)
    with pytest.warns(UserWarning, match="takes an array of dtype float16"):
        gradient(half)
    narrow = ls.scale_block(lambda w: w.astype(jnp.float16))
    with pytest.warns(UserWarning, match="returns an array of dtype float16"):
        jax.jit(jax.grad(lambda w: jnp.sum(narrow(w))))(W)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.filterwarnings("ignore:Gradients may underflow at the border")
def test_a_wider_block_leaves_room_for_its_parameters(dtype):
    def inside(w, x):
        return (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)

    half, ours = W.astype(jnp.float16), ls.scale_block(inside, dtype=dtype)
    scale = 2.0**-10  # in float16, what is not divided at once stays
    grads, expected = (
        jax.jit(jax.grad(lambda w, f=f: scale * jnp.sum(f(w, X))))(half)
        for f in (ours, inside)
    )
    np.testing.assert_allclose(grads, expected, rtol=2e-2, atol=1e-5)
    # The cotangent of an output in float16, too.
    narrow = ls.scale_block(lambda x: x.astype(dtype).astype(jnp.float16), dtype=dtype)
    gradient = jax.grad(lambda x: jnp.sum(narrow(x)).astype(jnp.float32))
    assert float(jax.jit(gradient)(1.0)) == 1


BATCH = np.ones((8, 2, 4), np.float32)
BATCH *= np.float32(10.0) ** -np.arange(8, dtype=np.float32)[:, None, None]


def normalized(w, x):
    y = single(w, x)
    return y - jax.lax.pmean(y, "data")


def on_devices(block, check_vma=True):
    """Gradients of what all share, by a batch whose parts differ in size."""

    def gradient(w, x):
        grads = tiny_gradient(block, w, x)
        # With `check_vma` jax adds them up.
        return grads if check_vma else jax.lax.psum(grads, "data")

    mapped = on_mesh(gradient, (P(), P("data")), P(), MESH, check_vma=check_vma)
    return mapped(W, BATCH)


def over_members(block):
    gradient = functools.partial(tiny_gradient, block)
    return jax.jit(jax.vmap(gradient, (None, 0), axis_name="data"))(W, BATCH)


# Where a block runs, and one that needs `axis_name` there.
PLACES = {
    "shard_map": (on_devices, single, ("data",)),
    "without check_vma": (lambda block: on_devices(block, False), normalized, "data"),
    "vmap": (over_members, normalized, ("data",)),
}


@pytest.mark.parametrize(("place", "block", "name"), PLACES.values(), ids=PLACES)
def test_devices_agree_on_a_scale_or_are_refused(place, block, name):
    close(place(ls.scale_block(block, axis_name=name)), place(block))
    with pytest.raises(ValueError, match=r"`axis_name` must name every.*\['data'\]"):
        place(ls.scale_block(block))


def test_devices_that_share_nothing_have_their_own_scales():
    ours = on_devices(ls.scale_block(single), check_vma=False)
    close(ours, on_devices(single, check_vma=False))


REFUSED = {
    "`fun` must be a function, got 3": lambda: ls.scale_block(3),
    "`headroom` must be .* 0 to 126": lambda: ls.scale_block(single, headroom=-1),
    "`dtype` must be a floating": lambda: ls.scale_block(single, dtype="int8"),
    "an axis of the surrounding": jax.jit(lambda: tiny_gradient(by_axis(single))),
}


@pytest.mark.parametrize(("message", "use"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_work_is_refused(message, use):
    with pytest.raises((TypeError, ValueError), match=message):
        use()


def test_an_axis_is_needed_only_for_differentiation():
    np.testing.assert_array_equal(by_axis(single)(W, X), single(W, X))
