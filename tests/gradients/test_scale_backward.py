"""scale_backward."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

TINY = 2.0**-40  # what no float16 number is: all gradients of a loss times it are zero
W = jax.random.normal(jax.random.key(0), (4, 4))
WS = jax.random.normal(jax.random.key(1), (5, 4, 4))
X = jax.random.normal(jax.random.key(2), (3, 4))
KEYS = jax.random.split(jax.random.key(3), 3)
Z = jnp.array([1 + 2j, 3 - 1j])


def plain(f):
    return f


def layer(w, x, dtype=jnp.float16):
    w, x = w.astype(dtype), x.astype(dtype)
    return jnp.tanh(jnp.dot(x, w)).astype(jnp.float32)


single = functools.partial(layer, dtype=jnp.float32)


def dropout(w, key):
    return w * jax.random.bernoulli(key, 0.5, w.shape)


def with_extras(w, key):
    """Outputs of other types, and one that the loss does not depend on."""
    return w**2, key, jnp.arange(3), jnp.sin(w), None, "text"


def static(w, n, act, *, flag, shape):
    return act(w.reshape(*shape.tolist(), n)) * (2 if flag else 1)


def scan(wrap, f, ws):
    return jax.lax.scan(lambda x, w: (wrap(f)(w, x), None), X, ws)[0]


def checkpointed(outside):
    policy = jax.checkpoint_policies.dots_saveable
    remat = functools.partial(jax.checkpoint, policy=policy)
    if outside:
        return lambda wrap, w: scan(lambda f: remat(wrap(f)), single, w)
    return lambda wrap, w: scan(lambda f: wrap(remat(f)), single, w)


USES = {
    "an argument": (lambda wrap, w: wrap(single)(w, X), W),
    "both arguments": (lambda wrap, t: wrap(single)(*t), (W, X)),
    "closed over": (lambda wrap, w: wrap(lambda x: single(w, x))(X), W),
    "a tree": (
        lambda wrap, p: wrap(lambda p, x: single(p["w"], x) + p["b"])(p, x=X),
        {"w": W, "b": jnp.ones(4), "none": None},
    ),
    "static arguments": (
        lambda wrap, w: wrap(static)(
            w, 2, jnp.tanh, flag=True, shape=np.array([4, -1])
        ),
        W,
    ),
    "complex": (lambda wrap, z: jnp.abs(wrap(jnp.square)(z)), Z),
    "a key": (lambda wrap, w: wrap(dropout)(w, KEYS[0]), W),
    "keys under vmap": (
        lambda wrap, w: jax.vmap(lambda key: wrap(lambda: dropout(w, key))())(KEYS),
        W,
    ),
    "integers under vmap": (
        lambda wrap, w: jax.vmap(lambda i: wrap(lambda: single(w, X)[i])())(
            jnp.arange(3)
        ),
        W,
    ),
    "around vmap": (
        lambda wrap, w: wrap(jax.vmap(single, (None, 0)))(w, X),
        W,
    ),
    "other outputs": (lambda wrap, w: wrap(with_extras)(w, KEYS[0])[0], W),
    "a scan": (lambda wrap, ws: scan(wrap, single, ws), WS),
    "a scan that closes over": (
        lambda wrap, w: jax.lax.scan(
            lambda x, _: (wrap(lambda x: single(w, x))(x), None), X, None, length=3
        )[0],
        W,
    ),
    "inside of checkpoint": (checkpointed(outside=True), WS),
    "around checkpoint": (checkpointed(outside=False), WS),
    "nested": (
        lambda wrap, w: wrap(lambda w: 2.0**-20 * wrap(single)(w, wrap(single)(w, X)))(
            w
        ),
        W,
    ),
    "jitted inside": (lambda wrap, w: wrap(jax.jit(single))(w, X), W),
}


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        largest = np.abs(e).max()
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_values_and_gradients_are_those_of_the_function(use):
    function, inputs = use

    def loss_fn(wrap, inputs):
        return TINY * jnp.sum(function(wrap, inputs) ** 2)

    def differentiated(inputs):
        wrappers = (ls.scale_backward, plain)
        return [jax.value_and_grad(loss_fn, argnums=1)(w, inputs) for w in wrappers]

    ours, theirs = jax.jit(differentiated)(inputs)
    assert_close(ours, theirs)


def test_float32_gradients_are_equal_bit_for_bit_uncompiled():
    """Where the same operations run, powers of two change no digit."""

    def loss_fn(wrap, w):
        return TINY * jnp.sum(wrap(single)(w, X) ** 2)

    ours, theirs = (jax.grad(loss_fn, 1)(f, W) for f in (ls.scale_backward, plain))
    np.testing.assert_array_equal(ours, theirs)


def test_float16_gradients_that_vanish_are_rounded_and_no_more():
    def loss_fn(f, w):
        return TINY * jnp.sum(f(w, X) ** 2)

    gradient = jax.jit(jax.grad(loss_fn, 1), static_argnums=0)
    exact = gradient(single, W)
    assert not gradient(layer, W).any(), "the control"
    error = gradient(ls.scale_backward(layer), W) - exact
    assert jnp.linalg.norm(error) < 2e-3 * jnp.linalg.norm(exact)


DEPTH, WIDTH = 28, 64


@functools.partial(jax.jit, static_argnums=(0, 1))
def layer_gradients(dtype, wrap, ws, scale):
    """The gradients of a sigmoid network, which shrink from layer to layer."""

    @wrap
    def sigmoid_layer(w, x):
        w, x = w.astype(dtype), x.astype(dtype)
        return jax.nn.sigmoid(jnp.dot(x, w)).astype(jnp.float32)

    def loss_fn(ws):
        x = jax.random.normal(jax.random.key(1), (32, WIDTH))
        y, _ = jax.lax.scan(lambda x, w: (sigmoid_layer(w, x), None), x, ws)
        return scale * jnp.mean((y - 0.25) ** 2)

    return jax.grad(loss_fn)(ws) / scale


@pytest.mark.slow
def test_a_scale_for_each_layer_trains_what_no_single_scale_can():
    ws = jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH)) * 1.7 * WIDTH**-0.5

    def gradients(*args):
        # The squares of the least would underflow in float32.
        return np.float64(layer_gradients(*args))

    exact = gradients(jnp.float32, plain, ws, 1.0)
    sizes = np.linalg.norm(exact, axis=(1, 2))

    def worst(dtype, wrap=plain, scale=1.0):
        difference = gradients(dtype, wrap, ws, scale) - exact
        with np.errstate(invalid="ignore"):
            errors = np.linalg.norm(difference, axis=(1, 2)) / sizes
        return np.max(np.where(np.isfinite(errors), errors, np.inf))

    assert sizes[-1] > 2.0**30 * sizes[0], "they span more than float16 does"
    assert worst(jnp.float16, ls.scale_backward) < 0.003
    assert 0.02 < worst(jnp.bfloat16) < 0.05
    assert min(worst(jnp.float16, scale=2.0**k) for k in range(0, 45)) > 0.9


class Spy:
    """Notes the cotangent that arrives at a place inside of a block."""

    def __init__(self):
        self.cotangent = None
        self.place = jax.custom_vjp(lambda x: x)
        self.place.defvjp(lambda x: (x, None), self.note)

    def note(self, _, cotangent):
        jax.debug.callback(self.keep, cotangent)
        return (cotangent,)

    def keep(self, cotangent):
        self.cotangent = np.asarray(cotangent)


def scales(cotangents, **options):
    """The scales at which a block's backward pass runs, one for each cotangent."""
    spy = Spy()
    block = ls.scale_backward(lambda x: spy.place(x), **options)
    pullback = jax.jit(lambda c: jax.vjp(block, jnp.zeros_like(c))[1](c))
    for cotangent in cotangents:
        (out,) = pullback(jnp.asarray(cotangent, jnp.float32))
        np.testing.assert_array_equal(out, np.float32(cotangent))
        jax.effects_barrier()
        with np.errstate(all="ignore"):
            yield spy.cotangent / np.asarray(cotangent, np.float32), cotangent


@pytest.mark.parametrize(
    "options",
    [{}, {"headroom": 0.5}, {"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn"}],
    ids=str,
)
def test_the_scale_is_the_one_that_is_suggested_for_the_cotangent(options):
    bounds = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    cotangents = [[x, x / 3] for x in (1.0, 1e-6, 1e-30, 4e-38, 767.5, 769.0, 2e38)]
    for scale, cotangent in scales(cotangents, **options):
        sums = jnp.sum(jnp.array(cotangent))
        suggested = ls.suggest_loss_scale(
            [sums], **{"headroom": 6.0, **bounds, **options}
        )
        np.testing.assert_array_equal(scale, suggested.loss_scale)


@pytest.mark.parametrize("shape", [(4096, 4), (64, 64, 4), (4096,), ()])
def test_sums_over_large_batches_fit(shape):
    """Where all examples agree, that of a bias is their number times as large."""

    @ls.scale_backward
    def block(bias):
        x = jnp.zeros(shape, jnp.float16) + bias.astype(jnp.float16)
        return x.astype(jnp.float32)

    bias = jnp.zeros(shape[-1:] if len(shape) > 1 else ())
    gradient = jax.jit(jax.grad(lambda bias: TINY * jnp.sum(block(bias))))(bias)
    expected = TINY * np.prod(shape[:-1] if len(shape) > 1 else shape)
    np.testing.assert_allclose(gradient, np.full(bias.shape, expected), rtol=1e-3)


def test_a_block_whose_gradients_add_up_although_its_cotangent_does_not_is_trained():
    """Balanced classes: the sum over the batch is zero, that of any weight is not."""
    sign = jnp.where(jnp.arange(4096) % 2 == 0, 1.0, -1.0)[:, None]

    @ls.scale_backward
    def dense(w, x):
        return jnp.dot(x.astype(jnp.float16), w.astype(jnp.float16)).astype(jnp.float32)

    def loss_fn(w):
        margins = sign * dense(w, sign * jnp.ones((1, 8)))
        return TINY * jnp.mean(jnp.log1p(jnp.exp(-margins)))

    gradient = jax.jit(jax.grad(loss_fn))(jnp.zeros((8, 1)))
    np.testing.assert_allclose(gradient, np.full((8, 1), -0.5 * TINY), rtol=1e-3)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nan_and_infinity_pass_at_scale_1(bad):
    [(ratio, _)] = scales([[bad, 1e-9]])
    assert ratio[1] == 1


def test_a_cotangent_of_zeros_stays_zero():
    gradient = jax.grad(lambda w: 0.0 * jnp.sum(ls.scale_backward(layer)(w, X)))(W)
    np.testing.assert_array_equal(gradient, np.zeros((4, 4)))


def test_nan_beside_numbers_is_not_hidden():
    (out,) = jax.vjp(ls.scale_backward(lambda x: x * 2), jnp.zeros(3))[1](
        jnp.array([jnp.nan, 1e-9, 0.0])
    )
    np.testing.assert_array_equal(out, np.float32([np.nan, 2e-9, 0.0]))


def test_overflow_inside_of_a_block_is_skipped_by_the_optimizer():
    tx = ls.with_loss_scaling(optax.adam(0.1), ls.FixedLossScale(1.0))
    w = jnp.ones(2)
    opt_state = tx.init(w)
    # The third one overflows in the forward pass, the fourth in the backward pass.
    for gain, slope, applied in (
        *((1.0, 6.0, True), (1e-30, 6.0, True)),
        *((2e4, 6.0, False), (1e-4, 6e4, False), (1.0, 6.0, True)),
    ):

        @ls.scale_backward
        def block(w, slope=slope):
            return (jnp.float16(slope) * w.astype(jnp.float16)).astype(jnp.float32)

        def loss_fn(w, gain=gain, block=block):
            return jnp.sum(block(gain * w) ** 2)

        updates, opt_state = tx.update(jax.grad(loss_fn)(w), opt_state, w)
        assert ls.was_applied(opt_state) == applied
        w = optax.apply_updates(w, updates)
    assert ls.all_finite(w) and ls.get_loss_scale(opt_state) == 1


@pytest.mark.slow
def test_derivatives_of_derivatives_are_those_of_the_function():
    def loss_fn(wrap, w):
        return jnp.sum(wrap(single)(w, X) ** 2)

    def derivatives(wrap):
        loss = functools.partial(loss_fn, wrap)
        gradient = jax.grad(loss)
        return {
            "reverse over reverse": jax.grad(lambda w: jnp.sum(gradient(w) ** 2))(W),
            "forward over reverse": jax.jvp(gradient, (W,), (W,))[1],
            "hessian": jax.hessian(loss)(W),
            "jacrev": jax.jacrev(gradient)(W),
        }

    ours, theirs = map(derivatives, (ls.scale_backward, plain))
    assert_close(ours, theirs)


def test_forward_mode_is_refused():
    block = ls.scale_backward(single)
    with pytest.raises(
        TypeError, match="`scale_backward` has no derivative in forward"
    ):
        jax.jvp(lambda w: block(w, X), (W,), (W,))
    with pytest.raises(TypeError, match="Use reverse mode"):
        jax.jacfwd(lambda w: block(w, X))(W)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.jit(lambda w: block(w, X)), (W,), (W,))


def test_the_function_is_evaluated_once_in_each_direction():
    def dots(wrap):
        gradient = jax.grad(lambda ws: jnp.sum(scan(wrap, single, ws)))
        text = jax.jit(gradient).lower(WS).compile().as_text()
        return text.count(" dot(")

    assert dots(ls.scale_backward) == dots(plain) > 0


def test_it_costs_nothing_where_nothing_is_differentiated():
    ours, theirs = (
        jax.jit(f).lower(W, X).compile().cost_analysis()
        for f in (ls.scale_backward(layer), layer)
    )
    assert ours == theirs and theirs["flops"] > 0


def test_float16_at_the_border_is_warned_of_where_the_block_is_called():
    half_w, half_x = (a.astype(jnp.float16) for a in (W, X))
    narrow_in = ls.scale_backward(lambda w, x: jnp.dot(x, w).astype(jnp.float32))
    narrow_out = ls.scale_backward(lambda w, x: jnp.dot(x, w.astype(jnp.float16)))

    def in_a_scan(w):
        return jax.lax.scan(
            lambda c, _: (c + narrow_in(w, half_x), None), X, None, length=2
        )[0]

    for function, w, side in (
        (lambda w: narrow_in(w, half_x), half_w, r"takes .* shape \(4, 4\)"),
        (in_a_scan, half_w, r"takes .* shape \(4, 4\)"),
        (lambda w: narrow_out(w, half_x), W, r"returns .* shape \(3, 4\)"),
    ):
        gradient = jax.grad(lambda w, f=function: jnp.sum(f(w).astype(jnp.float32)))
        with pytest.warns(
            UserWarning, match=rf"{side}\. They are scaled only inside"
        ) as record:
            jax.jit(gradient)(w)
        assert {w.filename for w in record} == {__file__}


def test_inputs_in_float16_that_are_not_differentiated_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = ls.scale_backward(layer)
        jax.grad(lambda w: block(w, X.astype(jnp.float16)).sum())(W)
        jax.grad(lambda w: block(w, X).sum())(W.astype(jnp.bfloat16))
        block(W.astype(jnp.float16), X)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fun": 3}, TypeError, "`fun` must be a function, got 3"),
        ({"headroom": -1}, ValueError, "`headroom` must be a number from 0 to 126"),
        ({"headroom": "6"}, ValueError, "`headroom` must be .* got '6'"),
        ({"dtype": "int8"}, ValueError, "`dtype` must be a floating-point type"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ls.scale_backward(**{"fun": single, **arguments})


def test_a_traced_headroom_is_refused():
    with pytest.raises(
        ValueError, match="`headroom` must hold concrete numbers, got a"
    ):
        jax.jit(lambda h: ls.scale_backward(single, headroom=h)(W, X))(6.0)


def test_effects_are_refused_but_for_debugging():
    seen = []

    def shown(w):
        jax.debug.callback(lambda x: seen.append(float(x)), w[0, 0])
        return jnp.sin(w)

    jax.grad(lambda w: ls.scale_backward(shown)(w).sum())(W)
    jax.effects_barrier()
    assert seen == [float(W[0, 0])]

    def printed(w):
        jax.experimental.io_callback(print, None, jax.lax.stop_gradient(w))
        return w

    with pytest.raises(
        TypeError, match=r"`fun` must be .* got one with \['IOEffect'\]"
    ):
        ls.scale_backward(printed)(W)


def test_a_function_that_changes_its_arguments_is_refused():
    def counting(state, w):
        state["count"] = state["count"] + 1
        return w

    with pytest.raises(ValueError, match=r"`fun` must not change its arguments.*count"):
        ls.scale_backward(counting)({"count": jnp.zeros(())}, W)


MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
# Every device has gradients of another size.
BATCH = jnp.ones((8, 2, 4)) * 10.0 ** -jnp.arange(8.0)[:, None, None]


def normalized(w, x):
    y = single(w, x)
    return y - jax.lax.pmean(y, "data")


def on_devices(wrap, f, check_vma, parallel=None):
    def gradient(w, x):
        grads = jax.grad(lambda w: TINY * jnp.sum(wrap(f)(w, x) ** 2))(w)
        # With `check_vma` jax adds up the gradients of what all devices share.
        return grads if check_vma else jax.lax.psum(grads, "data")

    if parallel is not None:
        return parallel(gradient, in_axes=(None, 0), axis_name="data")(W, BATCH)
    return jax.jit(
        jax.shard_map(
            gradient,
            mesh=MESH,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )(W, BATCH)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("f", [single, normalized])
def test_devices_agree_on_a_scale_where_they_are_told_the_axis(f, check_vma):
    wrap = functools.partial(ls.scale_backward, axis_name="data")
    assert_close(on_devices(wrap, f, check_vma), on_devices(plain, f, check_vma))


@pytest.mark.parametrize(
    ("f", "check_vma"), [(single, True), (normalized, True), (normalized, False)]
)
def test_a_missing_axis_is_refused(f, check_vma):
    with pytest.raises(ValueError, match=r"`axis_name` must name every.*\['data'\]"):
        on_devices(ls.scale_backward, f, check_vma)


def test_each_device_has_its_own_scale_where_nothing_is_shared_inside():
    assert_close(
        on_devices(ls.scale_backward, single, False),
        on_devices(plain, single, False),
    )


def test_sums_over_devices_fit():
    @functools.partial(ls.scale_backward, axis_name="data", headroom=1.0)
    def block(bias, x):
        return (x.astype(jnp.float16) + bias.astype(jnp.float16)).astype(jnp.float32)

    def gradient(bias, x):
        return jax.grad(lambda bias: TINY * jnp.sum(block(bias, x)))(bias)

    mapped = jax.shard_map(
        gradient, mesh=MESH, in_specs=(P(), P("data")), out_specs=P()
    )
    grads = jax.jit(mapped)(jnp.zeros(4), jnp.zeros((8 * 512, 4)))
    np.testing.assert_array_equal(grads, np.full(4, 8 * 512 * TINY))


@pytest.mark.parametrize(
    "parallel", [pytest.param(jax.vmap, marks=pytest.mark.slow), jax.pmap]
)
def test_an_axis_of_vmap_and_pmap_will_do(parallel):
    wrap = functools.partial(ls.scale_backward, axis_name=("data",))
    ours, theirs = (on_devices(w, normalized, False, parallel) for w in (wrap, plain))
    assert_close(ours, theirs)
    with pytest.raises(ValueError, match="`axis_name` must name every mapped axis"):
        on_devices(ls.scale_backward, normalized, False, parallel)


def test_collectives_of_the_backward_pass_alone_are_seen():
    """As Megatron-LM has them around a layer that is cut across devices."""

    @jax.custom_vjp
    def enter(x):
        return x

    def backward(_, cotangent):
        return (jax.lax.psum(cotangent, "data"),)

    enter.defvjp(lambda x: (x, None), backward)

    def entered(w, x):
        return single(w, enter(x))

    def of_inputs(wrap):
        def gradient(x):
            return jax.grad(lambda x: TINY * jnp.sum(wrap(entered)(W, x) ** 2))(x)

        return jax.vmap(gradient, axis_name="data")(BATCH)

    with pytest.raises(ValueError, match=r"`axis_name` must name every.*\['data'\]"):
        of_inputs(ls.scale_backward)
    assert_close(
        of_inputs(functools.partial(ls.scale_backward, axis_name="data")),
        of_inputs(plain),
    )


@pytest.mark.slow
def test_second_derivatives_across_devices_are_those_of_the_function():
    def hessian(wrap):
        def of_member(w, x):
            def loss_fn(v):
                return jnp.sum(wrap(normalized)(v * w, x) ** 3)

            return jax.hessian(loss_fn)(1.0)

        return jax.vmap(of_member, (None, 0), axis_name="data")(W, BATCH)

    wrap = functools.partial(ls.scale_backward, axis_name="data")
    np.testing.assert_allclose(hessian(wrap), hessian(plain), rtol=1e-4, atol=1e-6)


def test_no_tracer_outlives_its_trace():
    with jax.check_tracer_leaks():
        jax.jit(jax.grad(lambda w: ls.scale_backward(layer)(w, X).sum()))(W)


def test_an_axis_that_is_not_bound_is_refused_where_it_is_needed():
    block = ls.scale_backward(single, axis_name="data")
    block(W, X)
    with pytest.raises(
        ValueError, match="`axis_name` must name an axis of the surround"
    ):
        jax.grad(lambda w: block(w, X).sum())(W)


def test_explicit_meshes_keep_their_shardings():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    w = jax.device_put(W, NamedSharding(mesh, P()))

    def gradients(wrap):
        loss_fn = lambda w, x: TINY * jnp.sum(wrap(single)(w, x) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss_fn, (0, 1)))(w, x)

    ours, theirs = gradients(ls.scale_backward), gradients(plain)
    assert_close(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.sharding == b.sharding
