"""Loops keep no more for their backward pass than in float32, and most keep less."""

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float32_losses import (
    PRODUCTS,
    by_hand,
    highest,
    jit_that_rounds,
    own_jvp,
    own_vjp,
    plain,
)
from jax import nn
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from shared import slow_but
from training import normal

import optax_lossscale as ls
from optax_lossscale._programs.primitives import CHECKPOINTS
from optax_lossscale._programs.rewrite import equations

cast = functools.partial(ls.autocast, dtype="float16")
LAYERS, ROWS, WIDTH = 4, 32, 64
STACK = {
    "w": normal(LAYERS, WIDTH, WIDTH, seed=1),
    "up": normal(LAYERS, WIDTH, 4 * WIDTH, seed=2),
    "down": normal(LAYERS, 4 * WIDTH, WIDTH, seed=3),
    "key": np.arange(LAYERS),
}
X, BIG = normal(ROWS, WIDTH), np.ones((16, ROWS, WIDTH), np.float32)


def kept(fun, *args, argnums=(0, 1)):
    """The bytes that a function keeps to be differentiated by some of its arguments."""

    def pullback(*args):
        def of_some(some):
            return fun(*(some.get(i, x) for i, x in enumerate(args)))

        return jax.vjp(of_some, {i: args[i] for i in argnums})[1]

    program = jax.make_jaxpr(pullback)(*args).jaxpr
    given, found = {*map(id, program.invars)}, {id(x): x for x in program.outvars}
    avals = [x.aval for i, x in found.items() if i not in given]
    return sum(x.size * x.dtype.itemsize for x in avals)


def loop(body):
    """The carry after a loop over layers."""
    return lambda carry, stack: jax.lax.scan(
        lambda carry, p: (body(carry, p), None), carry, stack
    )[0]


# Bodies of loops: functions of what is carried and of the parameters of a layer.


def drop(x, seed):
    return x * jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape) / 0.9


def mlp(f, drop=lambda x, seed: x):
    return lambda x, p: x + drop(f(x @ p["up"]), p["key"]) @ p["down"]


RELU, GELU = mlp(nn.relu), mlp(nn.gelu)


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


def beside(used):
    """A body that carries something else, and uses it."""

    def body(carry, p):
        x, other = carry[0], carry[1] + 1
        return jnp.tanh(x @ p["w"]) * used(other), other

    return body


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


def ended(carry, p):
    x, is_over = carry
    x = jnp.where(is_over[:, None], 0, x)
    return nn.relu(x @ p["w"] + x), is_over | (p["key"] > 1)


def pooled(x, p):
    y = jnp.max((x @ p["up"]).reshape(ROWS, WIDTH, 4), 2)
    return jnp.concatenate([y, x], 1)[:, ::2]


def recurrent(x, p):
    def inner(c, row):
        c = 0.9 * c + jnp.tanh(row)
        return c, c

    return jnp.tanh(jax.lax.scan(inner, jnp.zeros(WIDTH), x @ p["w"])[1])


def repeated(x, p):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"]), x)


def constrained(x, p):
    mesh = make_mesh(d=2)
    y = jax.lax.with_sharding_constraint(x @ p["w"], NamedSharding(mesh, P("d")))
    return x + jnp.tanh(checkpoint_name(y, "product"))


def damped(y, norm=None):
    waves = jnp.fft.rfft(y, norm=norm)
    return jnp.fft.irfft(nn.sigmoid(jnp.abs(waves)) * waves, n=y.shape[1], norm=norm)


def filtered(x, p):
    return x + damped(x @ p["w"])


def scaled_spectrum(x, p):
    return x + nn.gelu(damped(x @ p["w"], norm="forward"))


def oscillators(x, p):
    """The states of a diagonal state space, one for each row."""
    decay = jnp.exp(1j * p["w"][0] - jnp.exp(p["w"][1]))

    def follow(state, u):
        state = decay * state + u
        return state, state

    start = jnp.zeros(WIDTH, "complex64")
    _, states = jax.lax.scan(follow, start, (x @ p["w"]).astype("complex64"))
    return x + nn.gelu(jnp.real(states))


def between_products(f):
    return lambda x, p: jnp.tanh(f(x @ p["w"], p["w"]) @ p["w"])


convolution = functools.partial(PRODUCTS["convolution"], plain)
experts = functools.partial(PRODUCTS["experts"], plain)
# The body, what it carries, and the kB that the loop keeps at most.
BODIES = {
    "transformer": (transformer(nn.gelu), X, 156.2),
    "transformer with dropout": (transformer(nn.relu, drop), X, 234.1),
    "LSTM": (lstm, (X, X), 131.1),
    "RNN": (lambda x, p: jnp.tanh(x @ p["w"] + x), X, 49.2),
    "MLP with relu": (RELU, X, 131.1),
    "MLP with gelu": (GELU, X, 98.4),
    "MLP with softplus": (mlp(nn.softplus), X, 327.8),
    "MLP with clip": (mlp(lambda y: jnp.clip(y, -1, 1)), X, 229.4),
    "maximum of another carried array": (beside(jnp.max), (X, BIG), 180.3),
    "logsumexp of another carried array": (beside(nn.logsumexp), (X, BIG), 573.6),
    "extractor without a gradient": (extractor, X, 65.6),
    "ring buffer": (ring_buffer, (X, BIG), 180.3),
    "residual vector quantization": (quantized, (X, X), 0.6),
    "sort": (lambda x, p: jnp.tanh(jnp.sort(x @ p["w"])), X, 98.4),
    "flags": (ended, (X, np.zeros(ROWS, bool)), 41.1),
    "maximum over four": (pooled, X, 65.6),
    "branches": (lambda *xp: jax.lax.cond(xp[1]["key"] > 1, GELU, RELU, *xp), X, 131.1),
    "spectrum": (filtered, X, 70.8),
    "spectrum divided by its length": (scaled_spectrum, X, 103.6),
    "states of complex numbers": (oscillators, X, 49.2),
    "loop inside": (recurrent, X, 49.2),
    "loop of products inside": (repeated, X, 82),
    "sharding and name": (constrained, X, 49.2),
    "nothing but a product": (lambda x, p: x @ p["w"], X, 32.8),
    "product with its own derivative": (between_products(own_jvp), X, 98.4),
    "product of the highest precision": (between_products(highest), X, 98.4),
    "bfloat16 product": (between_products(by_hand(jnp.matmul, "bfloat16")), X, 82),
    "convolution": (between_products(convolution), X, 82.1),
    "experts": (between_products(experts), X, 82),
}


def with_a_computed_table(x, stack):
    rows = jnp.sin(jnp.arange(1024 * WIDTH, dtype=jnp.float32)).reshape(-1, WIDTH)
    return loop(lambda x, p: nn.gelu(x @ p["w"] + jnp.sum(rows**2, 0)))(x, stack)


def framed(x, p):
    return nn.gelu(x @ p["w"] + jnp.mean(p["frame"], 0)) + x


def over_computed_frames(x, stack, cast=lambda f: f):
    frames = jnp.cos(jnp.arange(LAYERS * 512 * WIDTH, dtype=jnp.float32))
    frames = frames.reshape(LAYERS, 512, WIDTH)
    return cast(loop(framed))(x, {**stack, "frame": frames})


def over_copies(x, stack):
    _, copies = jax.lax.scan(lambda _, i: (None, x), None, stack["key"])
    return loop(framed)(x, {**stack, "frame": copies})


LOOPS = {name: (loop(body), x, most) for name, (body, x, most) in BODIES.items()}
LOOPS["table computed before it"] = with_a_computed_table, X, 49.5
LOOPS["frames computed before it"] = over_computed_frames, X, 50.2
LOOPS["copies of an argument"] = over_copies, X, 50.2


@pytest.mark.parametrize("name", LOOPS)
def test_loop_keeps_no_more_than_its_limit(name):
    run, carry, most = LOOPS[name]
    assert kept(cast(run), carry, STACK) <= 1000 * most


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_block_inside_of_the_loss_keeps_what_the_whole_loss_does(wrap):
    """Inputs of the block that the loss has computed are not in memory anyway."""

    def loss(cast, x, stack):
        run = functools.partial(over_computed_frames, stack=stack, cast=cast)
        return wrap(run)(x[None])

    block = functools.partial(loss, cast)
    whole = cast(functools.partial(loss, lambda f: f))
    assert kept(block, X, STACK) == kept(whole, X, STACK)


# What is differentiated by: the carry, the parameters, or both.
WAYS = {
    "both": kept,
    "parameters": functools.partial(kept, argnums=[1]),
    "carry": functools.partial(kept, argnums=[0]),
}
differentiated = pytest.mark.parametrize(
    "measure", slow_but([kept], WAYS.values()), ids=WAYS
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@differentiated
def test_loop_keeps_no_more_than_in_float32(name, measure):
    run, carry, _ = LOOPS[name]
    assert measure(cast(run), carry, STACK) <= measure(run, carry, STACK)


def on_two(body, check_vma, around=lambda run: run):
    """A loop over rows that two devices share."""

    def loss(x, stack):
        return jax.lax.pmean(jnp.mean(around(loop(body))(x, stack) ** 2), "d")

    specs = {"in_specs": (P("d"), P()), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(loss, mesh=make_mesh(d=2), **specs)


def drop_here(x, seed):
    key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("d"))
    return jax.lax.select(jax.random.bernoulli(key, 0.9, x.shape), x, 0 * x)


ON_TWO = {
    "relu and dropout": lambda x, p: drop_here(nn.relu(x @ p["w"]), p["key"]),
    "gelu of a mean": lambda x, p: nn.gelu(jax.lax.pmean(x @ p["w"], "d") + x),
    "sum of what varies": lambda x, p: (
        x + jnp.tanh(jax.lax.psum(nn.silu(x @ p["w"]), "d"))
    ),
    "maximum over devices": lambda x, p: jnp.tanh(
        x @ p["w"] - jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x)), "d")
    ),
    "own rule": lambda x, p: own_vjp(jnp.tanh(x @ p["w"]), p["w"]),
}


@pytest.mark.parametrize("body", ON_TWO.values(), ids=ON_TWO)
@pytest.mark.parametrize("check_vma", slow_but([True], [True, False]))
@pytest.mark.parametrize("place", ["around the devices", "on each device"])
@differentiated
def test_loop_on_two_devices_keeps_no_more_than_in_float32(
    body, check_vma, place, measure
):
    run, inside = on_two(body, check_vma), on_two(body, check_vma, cast)
    after = inside if place == "on each device" else cast(run)
    assert measure(after, X, STACK) <= measure(run, X, STACK)


# Numbers that all elements of a row decide on.
OF_ROWS = {
    "prod": lambda y: jnp.prod(jnp.tanh(y), 1, keepdims=True),
    "max": lambda y: jnp.max(jnp.tanh(y), 1, keepdims=True),
    "prod and max": lambda y: jnp.prod(jnp.tanh(y), 1, keepdims=True) * jnp.max(y),
    "min": lambda y: jnp.min(jnp.sin(y), 1, keepdims=True),
    "norm": lambda y: jnp.linalg.norm(y, axis=1, keepdims=True),
    "cumprod": lambda y: jnp.cumprod(jnp.tanh(y), 1),
    "clip and max": lambda y: jnp.clip(y, -0.5, 0.5) * jnp.max(y),
    "logsumexp": lambda y: nn.logsumexp(y, 1, keepdims=True),
    "spectrum": damped,
    "phase": lambda y: jnp.angle(jnp.fft.fft(y) + 20),
    "rotations": lambda y: jnp.abs(jnp.cumsum(y * jnp.exp(1j * y), 1)),
    "argmax": lambda y: y[jnp.argmax(jnp.sin(y), 1)],
    "softmax and dropout": lambda y: drop(nn.softmax(8 * y), 0),
}


@pytest.mark.parametrize("dtype", slow_but(["float16"], ["float16", "bfloat16"]))
@pytest.mark.parametrize(
    "name",
    slow_but(["prod", "max", "spectrum", "argmax", "softmax and dropout"], OF_ROWS),
)
def test_gradient_is_that_of_casts_by_hand_at_a_large_scale(name, dtype):
    """XLA may overwrite the factors of a recomputed product before it reads them."""
    x, stack = normal(16, 16, seed=1), normal(3, 16, 16, seed=2)

    def loss(product, stack):
        def body(x, w):
            y = product(x, w / 4)
            return jnp.tanh((y + OF_ROWS[name](y)) ** 2)

        return 2.0**14 * jnp.mean(loop(body)(x, stack) ** 2)

    by_autocast = ls.autocast(functools.partial(loss, jnp.matmul), dtype)
    cast_by_hand = functools.partial(loss, by_hand(jnp.matmul, dtype))
    both = jit_that_rounds(
        lambda stack: [jax.grad(f)(stack) for f in (by_autocast, cast_by_hand)]
    )
    ours, theirs = map(np.asarray, both(stack))
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert error < 4 * jnp.finfo(dtype).eps


@jax.custom_jvp
def by_rule(y):
    return jnp.tanh(y)


# Complex numbers in a derivative, which nobody sees from outside.
by_rule.defjvp(functools.partial(jax.jvp, damped))
COMPLEX = {
    "spectrum": filtered,
    "states": oscillators,
    "derivative": lambda x, p: x + by_rule(x @ p["w"]),
}


@pytest.mark.parametrize("body", COMPLEX.values(), ids=COMPLEX)
def test_body_of_complex_numbers_is_differentiated_twice(body):
    """JAX raises an error where a checkpoint saves one of them for two uses."""
    gradient = jax.grad(lambda x: jnp.sum(cast(loop(body))(x, STACK)))
    assert kept(gradient, X, argnums=[0])


def test_jit_around_autocast_hides_what_is_differentiated():
    """JAX does not say it inside, so a loop keeps more."""
    run, carry, _ = LOOPS["RNN"]
    seen, measure = cast(run), WAYS["carry"]
    assert measure(seen, carry, STACK) < measure(jax.jit(seen), carry, STACK)


def test_checkpoint_of_the_user_stays():
    """It keeps more than float32 does without a checkpoint. Ours would keep less."""
    everything = jax.checkpoint_policies.everything_saveable
    mine = jax.checkpoint(GELU, policy=everything)
    assert kept(cast(loop(mine)), X, STACK) > kept(loop(GELU), X, STACK)


def test_loop_is_differentiated_under_jax_remat3():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no such flag")
    jax.config.update("jax_remat3", True)
    try:
        assert kept(cast(loop(GELU)), X, STACK)
    finally:
        jax.config.update("jax_remat3", False)


def summed(x, stack):
    run = loop(lambda x, p: jnp.tanh(jax.lax.psum(x @ p["w"], "d")))
    return jax.vmap(run, (0, None), axis_name="d")(jnp.stack([x, x]), stack)


def solved(x, p):
    y = jax.lax.stop_gradient(x @ p["w"])
    y = jax.lax.fori_loop(0, p["key"] + 2, lambda _, y: jnp.tanh(y), y)
    return jnp.tanh(x @ p["w"]) * y


def debugged(x, p):
    jax.debug.callback(np.shape, p["w"])
    return jnp.tanh(x @ p["w"])


@jax.custom_vjp
def observed(x):
    return x


# An effect in a derivative, which nobody sees from outside.
observed.defvjp(
    lambda x: (io_callback(lambda x: x, jax.typeof(x), x), x),
    lambda x, y: (jnp.sin(x) * y,),
)


@jax.custom_vjp
def printed(x):
    return x


# A checkpoint may have this effect, and would repeat it.
printed.defvjp(
    lambda x: (x, jax.debug.callback(np.shape, x)), lambda _, y: (jnp.sin(y),)
)


def count_of(name, fun):
    """How many operations of this name the gradient of a function has."""
    gradient = jax.grad(lambda x: jnp.sum(fun(x, STACK)))
    found = equations(jax.make_jaxpr(gradient)(X))
    return sum(eqn.primitive.name.startswith(name) for eqn in found)


EXPENSIVE = {
    "random_bits": loop(lambda x, p: drop(jnp.tanh(x @ p["w"]), p["key"])),
    "fft": loop(filtered),
    "psum": summed,
    "while": loop(solved),
    "debug_callback": loop(debugged),
    "debug": loop(lambda x, p: printed(jnp.tanh(x @ p["w"]))),
    "io_callback": loop(lambda x, p: observed(jnp.tanh(x @ p["w"]))),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_expensive_operation_or_effect_is_not_repeated(name):
    fun = EXPENSIVE[name]
    assert 0 < count_of(name, cast(fun)) <= count_of(name, fun)


def test_loop_inside_of_a_while_is_left_as_it_is():
    """JAX differentiates nothing in a ``while`` backward, so nothing is kept."""

    def run(times):
        return jax.lax.fori_loop(0, times, lambda _, x: loop(GELU)(x, STACK), X)

    found = equations(jax.make_jaxpr(cast(run))(2))
    assert not CHECKPOINTS & {eqn.primitive.name for eqn in found}


def test_cheap_operation_in_an_inner_loop_is_recomputed():
    fun = loop(recurrent)
    assert count_of("tanh", cast(fun)) > count_of("tanh", fun) > 0


@pytest.mark.parametrize("moved", [plain, jnp.transpose, jnp.ravel])
def test_named_product_is_kept_in_float16(moved):
    def run(dtype, x, stack):
        def layer(x, p):
            h = moved(x.astype(dtype) @ p["w"].astype(dtype))
            h = checkpoint_name(h, "h").astype("float32")
            return x + nn.silu(h).reshape(x.shape)

        policy = jax.checkpoint_policies.save_only_these_names("h")
        return loop(jax.checkpoint(layer, policy=policy))(x, stack)

    by_autocast = cast(functools.partial(run, "float32"))
    cast_by_hand = functools.partial(run, "float16")
    assert kept(by_autocast, X, STACK) == kept(cast_by_hand, X, STACK)


def test_eager_loop_is_compiled_once(caplog):
    def layer(x, p):
        return GELU(x, p), None

    fun = cast(lambda x: jax.lax.scan(layer, x, STACK)[0])
    with jax.log_compiles():
        for _ in range(2):
            fun(X)
    assert len(re.findall(r"Compiling (?:jit\()?scan", caplog.text)) == 1


def programs_left(around):
    """How many programs stay in memory of a loop that was traced and is gone."""

    def trace():
        run = around(loop(lambda x, p: GELU(x, p)))
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(run(x, STACK))))(X)

    def count():
        gc.collect()
        return sum(isinstance(x, Jaxpr) for x in gc.get_objects())

    trace()  # JAX keeps the programs of its own functions
    before = count()
    trace()
    return count() - before


# jax 0.7 itself keeps up to 4096 programs of loops.
@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="needs a newer jax")
def test_loop_that_is_traced_anew_leaves_no_program():
    if programs_left(plain):
        pytest.skip("this jax itself keeps up to 4096 programs of loops")
    assert programs_left(cast) == 0
