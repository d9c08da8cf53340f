"""scale_block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EXPLICIT, make_mesh, normal, on_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

TINY = 2.0**-40  # what no float16 number is: all gradients of a loss times it are zero
W, WS, X = map(jnp.asarray, (normal(4, 4), normal(5, 4, 4), normal(3, 4, seed=1)))
KEYS = jax.random.split(jax.random.key(3), 3)
INDICES = jnp.arange(3)
Z = jnp.array([1 + 2j, 3 - 1j])
MESH = make_mesh(data=8)
by_axis = functools.partial(ls.scale_block, axis_name="data")


def layer(w, x, dtype=jnp.float16):
    return jnp.tanh(jnp.dot(x.astype(dtype), w.astype(dtype))).astype(jnp.float32)


single = functools.partial(layer, dtype=jnp.float32)


def biased(params, x):
    return single(params["w"], x) + params["b"]


def dropout(w, key):
    return w * jax.random.bernoulli(key, 0.5, w.shape)


def with_extras(w, key):
    """Outputs of other types, and one that the loss does not depend on."""
    return w**2, key, jnp.arange(3), jnp.sin(w), None, "text"


def static(w, n, act, *, flag, shape):
    return act(w.reshape(*shape.tolist(), n)) * (2 if flag else 1)


def scan(f, ws):
    return jax.lax.scan(lambda x, w: (f(w, x), None), X, ws)[0]


def each(wrap, f, xs):
    return jax.vmap(lambda x: wrap(lambda: f(x))())(xs)


def twice(wrap, w):
    return 2.0**-20 * wrap(single)(w, wrap(single)(w, X))


remat = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
TREE = {"w": W, "b": jnp.ones(4), "none": None}
STATIC = {"n": 2, "act": jnp.tanh, "flag": True, "shape": np.array([4, -1])}
# Uses of a block, given what is put around it, and what is differentiated.
USES = {
    "an argument": (lambda wrap, w: wrap(single)(w, X), W),
    "both arguments": (lambda wrap, t: wrap(single)(*t), (W, X)),
    "closed over": (lambda wrap, w: wrap(lambda x: single(w, x))(X), W),
    "a tree": (lambda wrap, tree: wrap(biased)(tree, x=X), TREE),
    "static arguments": (lambda wrap, w: wrap(static)(w, **STATIC), W),
    "complex": (lambda wrap, z: jnp.abs(wrap(jnp.square)(z)), Z),
    "a key": (lambda wrap, w: wrap(dropout)(w, KEYS[0]), W),
    "keys in vmap": (lambda wrap, w: each(wrap, lambda k: dropout(w, k), KEYS), W),
    "integers in vmap": (lambda wrap, w: each(wrap, lambda i: w[i] ** 2, INDICES), W),
    "around vmap": (lambda wrap, w: wrap(jax.vmap(single, (None, 0)))(w, X), W),
    "other outputs": (lambda wrap, w: wrap(with_extras)(w, KEYS[0])[0], W),
    "a scan": (lambda wrap, ws: scan(wrap(single), ws), WS),
    "inside of checkpoint": (lambda wrap, ws: scan(remat(wrap(single)), ws), WS),
    "around checkpoint": (lambda wrap, ws: scan(wrap(remat(single)), ws), WS),
    "nested": (lambda wrap, w: wrap(functools.partial(twice, wrap))(w), W),
    "jitted inside": (lambda wrap, w: wrap(jax.jit(single))(w, X), W),
}


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6 * np.abs(e).max())


@pytest.mark.parametrize(("use", "inputs"), USES.values(), ids=USES)
def test_values_and_gradients_are_those_of_the_function(use, inputs):
    def loss_fn(wrap, inputs):
        return TINY * jnp.sum(use(wrap, inputs) ** 2)

    def differentiated(inputs):
        both = jax.value_and_grad(loss_fn, argnums=1)
        return both(ls.scale_block, inputs), both(lambda f: f, inputs)

    assert_close(*jax.jit(differentiated)(inputs))


def tiny_gradient(block, w=W, x=X):
    return jax.grad(lambda w: TINY * jnp.sum(block(w, x) ** 2))(w)


def test_float32_gradients_are_equal_bit_for_bit_uncompiled():
    """Where the same operations run, powers of two change no digit."""
    ours = tiny_gradient(ls.scale_block(single))
    np.testing.assert_array_equal(ours, tiny_gradient(single))


def scales(cotangents, **options):
    """The scale of each element of each cotangent inside of a block."""
    seen = []
    place = jax.custom_vjp(lambda x: x)

    def note(_, cotangent):
        jax.debug.callback(lambda c: seen.append(np.asarray(c)), cotangent)
        return (cotangent,)

    place.defvjp(lambda x: (x, None), note)
    block = ls.scale_block(lambda x: place(x), **options)
    pullback = jax.jit(lambda c: jax.vjp(block, jnp.zeros_like(c))[1](c)[0])
    for cotangent in np.float32(cotangents):
        np.testing.assert_array_equal(pullback(cotangent), cotangent)
        jax.effects_barrier()
    with np.errstate(invalid="ignore"):
        return np.array(seen) / np.float32(cotangents)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (4096, 4)),
        ({"headroom": 0.5}, (64, 64, 4)),
        ({"dtype": "float8_e4m3fn"}, (4096,)),
        ({"dtype": "bfloat16"}, ()),
    ],
)
def test_the_scale_is_the_one_that_is_suggested_for_sums_over_the_batch(options, shape):
    batch = tuple(range(len(shape) - 1)) if len(shape) > 1 else None
    cotangent = np.random.default_rng(0).normal(size=shape)
    cotangent /= np.abs(cotangent).sum(batch).max()
    limits = {"headroom": 6.0, "min_scale": 2.0**-126, "max_scale": 2.0**126}
    # The third and the fourth are below and above 65504 / 2**6.
    cotangents = np.float32([s * cotangent for s in (1, 1e-30, 1023, 1024, 3e38)])
    for x, seen in zip(cotangents, scales(cotangents, **options), strict=True):
        sums = [jnp.sum(jnp.abs(x), batch)]
        suggested = ls.suggest_loss_scale(sums, **{**limits, **options})
        np.testing.assert_array_equal(seen, suggested.loss_scale)


def test_finite_cotangents_whose_sum_is_infinite_are_scaled_down():
    cotangents = np.full((2, 64), 3e38)
    cotangents[1] /= 8
    octaves = np.floor(np.log2(65504 / 2**6 / cotangents.sum(1, keepdims=True)))
    np.testing.assert_array_equal(scales(cotangents), 2.0**octaves + 0 * cotangents)


def test_around_a_whole_loss_the_scale_is_512():
    np.testing.assert_array_equal(scales([1.0]), 2.0**9)


def test_nan_and_infinity_pass_at_scale_1_and_zeros_stay_zero():
    seen = scales([[np.inf, 1e-9], [-np.inf, 1e-9], [np.nan, 1e-9], [0.0, 0.0]])
    np.testing.assert_array_equal(seen[:, 1], [1, 1, 1, np.nan])


def test_sums_over_devices_fit():
    @functools.partial(by_axis, headroom=1.0)
    def block(bias, x):
        return (x.astype(jnp.float16) + bias.astype(jnp.float16)).astype(jnp.float32)

    gradient = jax.grad(lambda bias, x: TINY * jnp.sum(block(bias, x)))
    mapped = on_mesh(gradient, (P(), P("data")), P(), MESH)
    grads = mapped(jnp.zeros(4), jnp.zeros((8 * 512, 4)))
    np.testing.assert_array_equal(grads, np.full(4, 8 * 512 * TINY))


def test_the_function_is_evaluated_once_in_each_direction_and_then_costs_nothing_else():
    def compiled(f):
        return jax.jit(f).lower(WS).compile()

    def dots(block):
        gradient = jax.grad(lambda ws: jnp.sum(scan(block, ws)))
        return compiled(gradient).as_text().count(" dot(")

    block = ls.scale_block(single)
    assert dots(block) == dots(single) > 0
    ours, theirs = (compiled(lambda ws, f=f: scan(f, ws)) for f in (block, single))
    assert ours.cost_analysis() == theirs.cost_analysis()


def narrow_in(w, x):
    return jnp.dot(x, w).astype(jnp.float32)


def narrow_out(w, x):
    return jnp.dot(x, w.astype(jnp.float16))


@pytest.mark.parametrize(
    ("block", "dtype", "message"),
    [
        (
            narrow_in,
            "float16",
            r"takes .* float16 and shape \(4, 4\)\. They are scaled",
        ),
        (narrow_out, "float32", r"returns .* float16 and shape \(3, 4\)\. They are"),
        (layer, "float32", None),  # x is float16, but it is not differentiated
        (layer, "bfloat16", None),
    ],
)
def test_float16_at_the_border_warns_where_the_block_is_made(block, dtype, message):
    block, xs = ls.scale_block(block), X.astype(jnp.float16)[None]

    def loss_fn(w):
        return jax.lax.scan(lambda c, x: (c, block(w, x)), None, xs)[1].sum()

    jax.make_jaxpr(loss_fn)(W.astype(jnp.float16))  # warnings are errors
    if message is None:
        jax.make_jaxpr(jax.grad(loss_fn))(W.astype(dtype))
        return
    with pytest.warns(UserWarning, match=message) as record:
        jax.make_jaxpr(jax.grad(loss_fn))(W.astype(dtype))
    assert {w.filename for w in record} == {__file__}


BATCH = jnp.asarray(np.ones((8, 2, 4)) * 10.0 ** -np.arange(8.0)[:, None, None])


def normalized(w, x):
    y = single(w, x)
    return y - jax.lax.pmean(y, "data")


def entered(w, x):
    """A block cut across devices, as of Megatron-LM: its backward pass has a psum."""
    enter = jax.custom_vjp(lambda x: x)
    enter.defvjp(lambda x: (x, None), lambda _, c: (jax.lax.psum(c, "data"),))
    return single(w, enter(x))


def on_devices(block, check_vma=True):
    """Gradients of what all share, by a batch whose parts differ in size."""

    def gradient(w, x):
        grads = tiny_gradient(block, w, x)
        # With `check_vma` jax adds them up.
        return grads if check_vma else jax.lax.psum(grads, "data")

    mapped = on_mesh(gradient, (P(), P("data")), P(), MESH, check_vma=check_vma)
    return mapped(W, BATCH)


def over_members(block, parallel=jax.vmap):
    gradient = functools.partial(tiny_gradient, block)
    run = parallel(gradient, in_axes=(None, 0), axis_name="data")
    return (jax.jit(run) if parallel is jax.vmap else run)(W, BATCH)


def by_inputs(block):
    def gradient(x):
        return tiny_gradient(lambda x, w: block(w, x), x, W)

    return jax.jit(jax.vmap(gradient, axis_name="data"))(BATCH)


# Where a block runs, and one that needs `axis_name` there.
PLACES = {
    "shard_map": (on_devices, single, ("data",)),
    "a collective": (on_devices, normalized, "data"),
    "without check_vma": (lambda block: on_devices(block, False), normalized, "data"),
    "vmap": (over_members, normalized, ("data",)),
    "pmap": (lambda block: over_members(block, jax.pmap), normalized, "data"),
    "the backward pass alone": (by_inputs, entered, "data"),
}


@pytest.mark.parametrize(("place", "block", "name"), PLACES.values(), ids=PLACES)
def test_devices_agree_on_a_scale_or_are_refused(place, block, name):
    assert_close(place(ls.scale_block(block, axis_name=name)), place(block))
    with pytest.raises(ValueError, match=r"`axis_name` must name every.*\['data'\]"):
        place(ls.scale_block(block))


def test_devices_have_scales_of_their_own_where_nothing_is_shared_inside():
    ours = on_devices(ls.scale_block(single), check_vma=False)
    assert_close(ours, on_devices(single, check_vma=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(ls.scale_block(single), single), (by_axis(normalized), normalized)],
)
def test_derivatives_of_derivatives_are_those_of_the_function(ours, theirs):
    def derivatives(block):
        def of_member(w, x):
            gradient = jax.grad(lambda v: jnp.sum(block(v * w, x) ** 3))
            return jax.jacfwd(gradient)(1.0), jax.jacrev(gradient)(1.0)

        return jax.vmap(of_member, (None, 0), axis_name="data")(W, BATCH)

    for a, e in zip(derivatives(ours), derivatives(theirs), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_explicit_meshes_keep_their_shardings():
    mesh = make_mesh(EXPLICIT, data=8)
    w = jax.device_put(W, NamedSharding(mesh, P()))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))

    def gradients(block):
        return jax.jit(jax.grad(lambda *a: TINY * jnp.sum(block(*a) ** 2), (0, 1)))(
            w, x
        )

    ours, theirs = gradients(ls.scale_block(single)), gradients(single)
    assert_close(ours, theirs)
    assert [g.sharding for g in ours] == [g.sharding for g in theirs]


def counting(w, counts):
    counts[0] = counts[0] + 1
    return w


def printing(w, x):
    jax.experimental.io_callback(print, None, jax.lax.stop_gradient(w))
    return w


def traced(headroom):
    return ls.scale_block(single, headroom=headroom)(W, X)


BLOCK, CHANGING = ls.scale_block(single), ls.scale_block(counting)
REFUSED = {
    "`fun` must be a function, got 3": lambda: ls.scale_block(3),
    "`headroom` must be .* 0 to 126": lambda: ls.scale_block(single, headroom=-1),
    "`headroom` must be a plain number": lambda: jax.jit(traced)(6.0),
    "`dtype` must be a floating": lambda: ls.scale_block(single, dtype="int8"),
    r"effects .* \['IOEffect'\]": lambda: ls.scale_block(printing)(W, X),
    r"must not change its .*kwargs\)\[0\]\[1\]\[0\]`": lambda: CHANGING(W, [X]),
    "an axis of the surrounding": lambda: tiny_gradient(by_axis(single)),
}


@pytest.mark.parametrize(("message", "use"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_work_is_refused(message, use):
    with pytest.raises((TypeError, ValueError), match=message):
        use()


PUT_AROUND = {
    "nothing": lambda block: block,
    "jit": jax.jit,
    "vmap": lambda block: jax.vmap(block, (None, 0)),
    "checkpoint": jax.checkpoint,
    "scan": lambda block: lambda w, _: scan(block, w[None]),
    "cond": lambda block: lambda *args: jax.lax.cond(True, block, block, *args),
}
FORWARD_MODES = {
    "jvp": lambda f: jax.jvp(f, (W,), (W,)),
    "jit of jvp": jax.jit(lambda f: jax.jvp(f, (W,), (W,)), static_argnums=0),
    "linearize": lambda f: jax.linearize(f, W)[1](W),
    "jacfwd": lambda f: jax.jacfwd(f)(W),
}


@pytest.mark.parametrize("around", PUT_AROUND.values(), ids=PUT_AROUND)
@pytest.mark.parametrize("evaluate", FORWARD_MODES.values(), ids=FORWARD_MODES)
def test_forward_mode_is_refused_with_the_way_out(evaluate, around):
    block = around(BLOCK)
    with pytest.raises(TypeError, match="forward-mode .*custom_vjp"):
        evaluate(lambda w: block(w, X))


def test_an_axis_is_needed_only_where_the_block_is_differentiated():
    np.testing.assert_array_equal(by_axis(single)(W, X), single(W, X))


def test_effects_of_debugging_are_kept():
    seen = []

    def shown(w, x):
        jax.debug.callback(lambda w: seen.append(float(w)), w[0, 0])
        return w

    tiny_gradient(ls.scale_block(shown))
    jax.effects_barrier()
    assert seen == [float(W[0, 0])]


def test_no_tracer_outlives_its_trace():
    with jax.check_tracer_leaks():
        jax.jit(functools.partial(tiny_gradient, ls.scale_block(layer)))(W)
