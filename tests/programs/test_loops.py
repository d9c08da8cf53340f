"""Loops keep no more for their backward pass than in float32, and most keep less."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close_in_float16
from float32_losses import BLOCKS, OTHERS, PRODUCTS, N, X, by_hand, own_vjp, plain
from jax import nn
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from shared import slow_but
from training import normal

import optax_lossscale as ls
from optax_lossscale._programs.rewrite import equations

LAYERS, ROWS, WIDTH = 4, 32, 64
STACK = {
    "w": normal(LAYERS, WIDTH, WIDTH, seed=1),
    "up": normal(LAYERS, WIDTH, 4 * WIDTH, seed=2),
    "down": normal(LAYERS, 4 * WIDTH, WIDTH, seed=3),
    "key": np.arange(LAYERS),
}
x, big = normal(ROWS, WIDTH), np.ones((16, ROWS, WIDTH), np.float32)


def kept(fun, *args):
    """The bytes that a function keeps for its backward pass, beside its arguments."""
    program = jax.make_jaxpr(lambda *args: jax.vjp(fun, *args)[1])(*args).jaxpr
    given, found = {*map(id, program.invars)}, {id(x): x for x in program.outvars}
    avals = [x.aval for i, x in found.items() if i not in given]
    return sum(x.size * x.dtype.itemsize for x in avals)


def loop(body):
    """The carry after a loop over layers."""
    return lambda carry, stack: jax.lax.scan(
        lambda carry, p: (body(carry, p), None), carry, stack
    )[0]


def drop(x, seed):
    return x * jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape) / 0.9


def mlp(f, drop=lambda x, seed: x):
    return lambda x, p: x + drop(f(x @ p["up"]), p["key"]) @ p["down"]


RELU, GELU = mlp(nn.relu), mlp(nn.gelu)
everything = jax.checkpoint_policies.everything_saveable


def transformer(f, drop=lambda x, seed: x):
    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def attention(x, p):
        q, k = norm(x) @ p["w"], x @ p["w"].T
        weights = nn.softmax(jnp.where(jnp.tri(ROWS, dtype=bool), q @ k.T, -1e9))
        return drop(weights, p["key"] + 9) @ x

    return lambda x, p: mlp(f, drop)(x + drop(attention(x, p), p["key"]), p)


def lstm(carry, p):
    h, c = carry
    i, f, g, o = jnp.split(h @ p["up"], 4, axis=1)
    c = nn.sigmoid(f + 1) * c + nn.sigmoid(i) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(c), c


def beside(following, used):
    """A body that carries something else, and uses it."""

    def body(carry, p):
        x, other = carry[0], following(carry[1])
        return jnp.tanh(x @ p["w"]) * used(other), other

    return body


def frozen_sine(features):
    return jax.lax.stop_gradient(jnp.sin(features))


def count(features):
    return jnp.sum(features > 0.3, axis=(0, 2))[:, None]


def extractor(x, p):
    frames = jnp.ones((ROWS, WIDTH)) * p["key"]
    features = nn.gelu(frames @ jnp.ones((WIDTH, 16 * WIDTH)))
    return jnp.tanh(x @ p["w"] + features[:, :WIDTH])


def ring_buffer(carry, p):
    x, buffer = carry
    y = jnp.tanh(x @ p["w"]) + jax.lax.stop_gradient(jnp.mean(buffer, (0, 1)))
    return y, jax.lax.stop_gradient(jnp.roll(buffer, 1, 0).at[0].set(y))


def quantized(carry, p):
    rest, total = carry
    codes = p["up"].T
    distances = jnp.sum(codes**2, 1) - 2 * rest @ codes.T
    nearest = codes[jnp.argmin(distances, 1)]
    return rest - nearest, total + rest + jax.lax.stop_gradient(nearest - rest)


def routed(x, p):
    return jnp.tanh(x @ p["w"]) * p["down"][jnp.argmax(x @ p["up"], 1)]


def ended(carry, p):
    x, is_over = carry
    x = jnp.where(is_over[:, None], 0, x)
    return nn.relu(x @ p["w"] + x), is_over | (p["key"] > 1)


def pooled(x, p):
    y = jnp.max((x @ p["up"]).reshape(ROWS, WIDTH, 4), 2)
    return jnp.concatenate([y, x], 1)[:, ::2]


def scanned_inside(x, p):
    def inner(c, row):
        c = 0.9 * c + jnp.tanh(row)
        return c, c

    return jnp.tanh(jax.lax.scan(inner, jnp.zeros(WIDTH), x @ p["w"])[1])


def products_inside(x, p):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"]), x)


def constrained(x, p):
    mesh = make_mesh(d=2)
    y = jax.lax.with_sharding_constraint(x @ p["w"], NamedSharding(mesh, P("d")))
    return x + jnp.tanh(checkpoint_name(y, "product"))


# The body, what it carries, and the kB that the loop keeps at most.
BODIES = {
    "transformer": (transformer(nn.gelu), x, 155.7),
    "LSTM": (lstm, (x, x), 131.1),
    "RNN": (lambda x, p: jnp.tanh(x @ p["w"] + x), x, 49.2),
    "maximum": (beside(lambda y: y + 1, jnp.max), (x, big), 180.3),
    "logsumexp": (beside(lambda y: y + 1, nn.logsumexp), (x, big), 573.5),
    "count": (beside(frozen_sine, count), (x, big), 180.8),
    "count of integers": (beside(lambda y: y + 1, count), (x, np.int32(big)), 49.7),
    "ring buffer": (ring_buffer, (x, big), 180.3),
    "flags": (ended, (x, np.zeros(ROWS, bool)), 41.1),
    "extractor without a gradient": (extractor, x, 65.6),
    "residual vector quantization": (quantized, (x, x), 0.6),
    "routing by argmax": (routed, x, 82.5),
    "maximum over four": (pooled, x, 65.6),
    "sort": (lambda x, p: jnp.tanh(jnp.sort(x @ p["w"])), x, 98.4),
    "branches": (lambda *xp: jax.lax.cond(xp[1]["key"] > 1, GELU, RELU, *xp), x, 98.4),
    "loop inside": (scanned_inside, x, 49.2),
    "loop of products inside": (products_inside, x, 82),
    "behind what changes no number": (constrained, x, 49.2),
    "MLP, clip": (mlp(lambda y: jnp.clip(y, -1, 1)), x, 98.4),
    "nothing but a product": (lambda x, p: x @ p["w"], x, 32.8),
}
for f in (nn.relu, nn.gelu, nn.silu, nn.mish, nn.softplus, nn.relu6):
    BODIES[f"MLP, {f.__name__}"] = (mlp(f), x, 98.4)
for f in (nn.relu, nn.gelu):
    BODIES[f"transformer, {f.__name__}, dropout"] = (transformer(f, drop), x, 200.8)


def around(f):
    """A body with a product before it and one behind it."""

    def body(x, w):
        y = x @ w
        return jnp.tanh((y + f(y, w)) @ w)

    return body


# All but those of which nothing is computed again.
LEFT = {"own vjp", "while", "checkpoint", "dots saveable", "remat in scan"}
if not hasattr(jax, "memory"):  # jax 0.7.0 fails if parameters are not differentiated
    LEFT.add("shard_map")
AMONG = OTHERS | {n: functools.partial(f, plain) for n, f in PRODUCTS.items()}
AMONG |= {name: block(jnp.matmul) for name, block in BLOCKS.items()}
AMONG = {name: around(f) for name, f in AMONG.items() if name not in LEFT}
# What is differentiated: what the loop carries from the start, what it scans over.
DIFFERENTIATED = {
    "both": lambda run, carry, stack: (run, carry, stack),
    "parameters": lambda run, carry, stack: (lambda stack: run(carry, stack), stack),
    "carry": lambda run, carry, stack: (lambda carry: run(carry, stack), carry),
}


@pytest.mark.parametrize("name", slow_but(["both", "parameters"], DIFFERENTIATED))
@pytest.mark.parametrize(("body", "carry", "most"), BODIES.values(), ids=BODIES)
def test_loop_keeps_few_bytes_and_no_more_than_float32(body, carry, most, name):
    run, *args = DIFFERENTIATED[name](loop(body), carry, STACK)
    before, after = kept(run, *args), kept(ls.autocast(run), *args)
    assert after <= before
    assert after <= 1000 * most or name != "both"


@pytest.mark.parametrize("name", slow_but(["both"], DIFFERENTIATED))
@pytest.mark.parametrize("body", AMONG.values(), ids=AMONG)
def test_operation_among_products_keeps_no_more_than_float32(body, name):
    run, *args = DIFFERENTIATED[name](loop(body), X, normal(LAYERS, N, N))
    assert kept(ls.autocast(run), *args) <= kept(run, *args)


@pytest.mark.parametrize("f", slow_but([nn.relu], [nn.relu, nn.gelu]))
def test_gradients_are_those_of_a_loop_that_keeps_everything(f):
    body = transformer(f, drop)
    keeping = jax.checkpoint(body, policy=everything)

    def gradient(body):
        def loss(stack):
            return jnp.mean(loop(body)(x, {**STACK, **stack}) ** 2)

        stack = {name: STACK[name] / WIDTH for name in ("w", "up", "down")}
        return jax.jit(jax.value_and_grad(ls.autocast(loss)))(stack)

    jax.tree.map(assert_close_in_float16, *map(gradient, (body, keeping)))


def spread(y, reduced):
    return jnp.tanh(y + reduced)


# What a body does with its product, of one row: numbers that all others decide on.
REDUCTIONS = {
    "sum": lambda y: spread(y, jnp.sum(jnp.tanh(y), 1, keepdims=True)),
    "prod": lambda y: spread(y, jnp.prod(jnp.tanh(y), 1, keepdims=True)),
    "max": lambda y: spread(y, jnp.max(jnp.tanh(y), 1, keepdims=True)),
    "min": lambda y: spread(y, jnp.min(jnp.sin(y), 1, keepdims=True)),
    "norm": lambda y: spread(y, jnp.linalg.norm(y, axis=1, keepdims=True)),
    "logsumexp": lambda y: spread(y, nn.logsumexp(y, 1, keepdims=True)),
    "cumprod": lambda y: spread(y, jnp.cumprod(jnp.tanh(y), 1)),
    "argmax": lambda y: spread(y, y[jnp.argmax(jnp.sin(y), 1)]),
    "clip": lambda y: spread(jnp.clip(y, -0.5, 0.5), jnp.max(y)),
    "prod and max": lambda y: jnp.tanh(REDUCTIONS["prod"](y) * jnp.max(y)),
    "square of prod": lambda y: jnp.tanh(
        (y + jnp.prod(jnp.tanh(y), 1, keepdims=True)) ** 2
    ),
}


@pytest.mark.parametrize("dtype", slow_but(["float16"], ["float16", "bfloat16"]))
@pytest.mark.parametrize("reduced", REDUCTIONS.values(), ids=REDUCTIONS)
def test_gradient_is_that_of_casts_by_hand_at_a_large_scale(reduced, dtype):
    """XLA may compute a recomputed product wrong, the more so at a large scale."""
    x, stack = normal(16, 16, seed=1), normal(3, 16, 16, seed=2)

    def gradient(cast, around=lambda f: f):
        body = loop(lambda x, w: reduced(cast(jnp.matmul)(x, w / 4)))
        loss = around(lambda stack: jnp.mean(body(x, stack) ** 2))
        return jax.jit(jax.grad(ls.scale_backward(loss, 2.0**14)))(stack)

    by_autocast = gradient(plain, lambda f: ls.autocast(f, dtype))
    with jax.disable_jit():  # XLA rounds bfloat16 otherwise
        expected = gradient(functools.partial(by_hand, dtype=dtype))
    error = jnp.linalg.norm(by_autocast - expected) / jnp.linalg.norm(expected)
    assert error < 4 * jnp.finfo(dtype).eps


def test_body_of_complex_numbers_can_be_differentiated():
    """Where a checkpoint keeps one for two uses, JAX raises an error."""

    def filtered(x, w):
        waves = jnp.fft.rfft(x @ w)
        return x + jnp.fft.irfft(nn.sigmoid(jnp.abs(waves)) * waves, n=WIDTH)

    assert kept(ls.autocast(loop(filtered)), x, STACK["w"])


def test_only_what_is_differentiated_is_counted():
    """Behind a ``jax.jit``, all arrays may be."""
    body, carry, _ = BODIES["logsumexp"]
    seen = ls.autocast(loop(body))
    hidden = jax.jit(seen)
    few, many = (kept(lambda p, f=f: f(carry, p), STACK) for f in (seen, hidden))
    assert 10 * few < many


def test_body_with_a_checkpoint_of_its_own_is_left_as_it_is():
    mine = jax.checkpoint(GELU, policy=everything)
    assert kept(ls.autocast(loop(mine)), x, STACK) > kept(loop(GELU), x, STACK)


def test_flag_that_changes_checkpoints_is_no_error():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no such flag")
    jax.config.update("jax_remat3", True)
    try:
        assert kept(ls.autocast(loop(GELU)), x, STACK)
    finally:
        jax.config.update("jax_remat3", False)


def dropped(x, w):
    return drop(jnp.tanh(x @ w), jnp.int32(w[0, 0]))


def summed(x, w):
    def body(x, w):
        return jnp.tanh(jax.lax.psum(x @ w, "d"))

    return jax.vmap(loop(body), (0, None), axis_name="d")(jnp.stack([x, x]), w)


def solved(x, w):
    """With a loop of which JAX cannot keep a part."""
    x_now, w_now = jax.lax.stop_gradient((x, w))
    end = (w_now[0, 0] * 0).astype(int) + 3
    y = jax.lax.fori_loop(0, end, lambda _, y: jnp.tanh(y @ w_now), x_now)
    return jnp.tanh(x @ w + y)


def iterated(x, w):
    return x + jnp.tanh(scanned_inside(x, {"w": w}))


@pytest.mark.parametrize(
    ("fun", "names", "again"),
    [
        (loop(dropped), ["random_bits"], False),
        (summed, ["psum", "psum_invariant"], False),
        (loop(solved), ["while"], False),
        (loop(iterated), ["tanh"], True),
    ],
)
def test_what_is_expensive_runs_once_and_what_is_cheap_again(fun, names, again):
    def count(fun):
        gradient = jax.grad(lambda *args: jnp.sum(fun(*args)))
        program = jax.make_jaxpr(gradient)(x, STACK["w"])
        return sum(eqn.primitive.name in names for eqn in equations(program))

    assert (count(ls.autocast(fun)) > count(fun)) == again and count(fun) > 0


def on_two(body, check_vma, around=lambda run: run):
    """The loss of a loop over rows that two devices share."""

    def loss(x, w):
        return jax.lax.pmean(jnp.mean(around(loop(body))(x, w) ** 2), "d")

    specs = {"in_specs": (P("d"), P()), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(loss, mesh=make_mesh(d=2), **specs)


def drop_here(x, seed):
    key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("d"))
    return jax.lax.select(jax.random.bernoulli(key, 0.9, x.shape), x, 0 * x)


ON_TWO = {
    "relu and dropout": lambda x, w: drop_here(nn.relu(x @ w), jnp.int32(w[0, 0])),
    "gelu of a mean": lambda x, w: nn.gelu(jax.lax.pmean(x @ w, "d") + x),
    "sum of what varies": lambda x, w: x + jnp.tanh(jax.lax.psum(nn.silu(x @ w), "d")),
    "maximum over devices": lambda x, w: jnp.tanh(
        x @ w - jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x)), "d")
    ),
    "own rule": lambda x, w: own_vjp(jnp.tanh(x @ w), w),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("body", ON_TWO.values(), ids=ON_TWO)
def test_loop_on_devices_keeps_no_more_than_float32(body, check_vma):
    """Its body cannot be traced by itself."""
    mapped = on_two(body, check_vma)
    for fun in (ls.autocast(mapped), on_two(body, check_vma, ls.autocast)):
        assert kept(fun, x, STACK["w"]) <= kept(mapped, x, STACK["w"])


def frames(x, w):
    """A loop over numbers that the function has computed."""
    pixels = jnp.cos(jnp.arange(LAYERS * 512 * WIDTH, dtype=jnp.float32))

    def body(x, p):
        w, frame = p
        return nn.gelu(x @ w + jnp.mean(frame, 0)) + x, None

    return jax.lax.scan(body, x, (w, pixels.reshape(LAYERS, 512, WIDTH)))[0]


def table(x, w):
    rows = jnp.sin(jnp.arange(1024 * WIDTH, dtype=jnp.float32)).reshape(-1, WIDTH)
    return loop(lambda x, w: nn.gelu(x @ w + jnp.sum(rows**2, 0)))(x, w)


@pytest.mark.parametrize("fun", [frames, table])
def test_loop_over_computed_numbers_keeps_no_more_than_float32(fun):
    assert kept(ls.autocast(fun), x, STACK["w"]) <= kept(fun, x, STACK["w"])


@pytest.mark.parametrize("moved", [lambda y: y, lambda y: y.T, jnp.ravel])
def test_named_product_is_kept_in_float16(moved):
    def loss(dtype, x, w):
        def layer(x, w):
            h = moved(x.astype(dtype) @ w.astype(dtype))
            h = checkpoint_name(h, "h").astype("float32")
            return x + nn.silu(h).reshape(x.shape)

        policy = jax.checkpoint_policies.save_only_these_names("h")
        return jnp.mean(loop(jax.checkpoint(layer, policy=policy))(x, w))

    by_autocast = ls.autocast(functools.partial(loss, "float32"))
    by_hand = functools.partial(loss, "float16")
    assert kept(by_autocast, x, STACK["w"]) == kept(by_hand, x, STACK["w"])


def test_eager_loop_is_compiled_once(caplog):
    def layer(x, p):
        return GELU(x, p), None

    fun = ls.autocast(lambda x: jax.lax.scan(layer, x, STACK)[0])
    with jax.log_compiles():
        for _ in range(2):
            fun(x)
    assert len(re.findall(r"Compiling (?:jit\()?scan", caplog.text)) == 1


SEEN = []


def note(x):
    SEEN.append(x)
    return x


def debugged(x):
    jax.debug.callback(note, x)
    return x


hiding = jax.custom_vjp(lambda x: x)
hiding.defvjp(
    lambda x: (io_callback(note, jax.typeof(x), x), x), lambda x, y: (jnp.sin(x) * y,)
)


@pytest.mark.parametrize("effect", [debugged, hiding])
def test_effect_happens_once(effect):
    """Also if it is in a derivative, where nobody sees it from outside."""
    SEEN.clear()
    run = ls.autocast(loop(lambda x, w: effect(jnp.tanh(x @ w))))
    gradient = jax.grad(lambda x: jnp.sum(run(x, STACK["w"])))
    jax.block_until_ready(jax.jit(gradient)(x))
    jax.effects_barrier()
    assert len(SEEN) == LAYERS
