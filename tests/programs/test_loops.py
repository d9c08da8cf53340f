"""Loops keep no more for their backward pass than in float32, and most keep less."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close_in_float16
from float32_losses import OTHERS, N, X, plain, random_program
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
    "row": np.zeros((LAYERS, ROWS), bool),
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


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def mlp(f, dropped=lambda x, p: x):
    return lambda x, p: x + dropped(f(x @ p["up"]), p["key"]) @ p["down"]


def attention(x, p, dropped=lambda x, seed: x):
    q, k = norm(x) @ p["w"], x @ p["w"].T
    weights = jax.nn.softmax(jnp.where(jnp.tri(ROWS, dtype=bool), q @ k.T, -1e9))
    return dropped(weights, p["key"] + 9) @ x


def transformer(f, dropped):
    def layer(x, p):
        x = x + dropped(attention(x, p, dropped), p["key"])
        return mlp(f, dropped)(x, p)

    return layer


def lstm(carry, p):
    h, c = carry
    i, f, g, o = jnp.split(h @ p["up"], 4, axis=1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def frozen_maximum(carry, p):
    x, features = carry
    return jnp.tanh(x @ p["w"]) * jnp.max(features), features + 1


def frozen_normalizer(carry, p):
    x, features = carry
    return jnp.tanh(x @ p["w"]) * jax.nn.logsumexp(features), features + 1


def frozen_extractor(x, p):
    frames = jnp.ones((ROWS, WIDTH)) * p["key"]
    features = jax.nn.gelu(frames @ jnp.ones((WIDTH, 16 * WIDTH)))
    return jnp.tanh(x @ p["w"] + features[:, :WIDTH])


def counted_features(carry, p):
    x, features = carry
    features = jax.lax.stop_gradient(jnp.sin(features))
    count = jnp.sum(features > 0.3, axis=(0, 2))
    return jnp.tanh(x @ p["w"]) * count[:, None], features


def counted_board(carry, p):
    x, board = carry
    count = jnp.sum(board == 1, axis=0) / ROWS
    return jnp.tanh(x @ p["w"]) * count, (3 * board + 1) % 7


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
    expert = jnp.argmax(x @ p["up"], 1)
    return jnp.tanh(x @ p["w"]) * p["down"][expert]


def sampled(x, p):
    action = jax.random.categorical(jax.random.key(p["key"]), x @ p["up"])
    return jnp.tanh(x @ p["w"] + p["down"][action])


def ended(carry, p):
    x, is_over = carry
    x = jnp.where(is_over[:, None], 0, x)
    return jax.nn.relu(x @ p["w"] + x), is_over | p["row"]


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


def branching(x, p):
    gelu, relu = mlp(jax.nn.gelu), mlp(jax.nn.relu)
    return jax.lax.cond(p["key"] > 1, gelu, relu, x, p)


# The name of a body, the body, what it carries, and the kB that the loop keeps at most.
BODIES = [
    ("transformer, gelu", transformer(jax.nn.gelu, lambda x, _: x), x, 155.7),
    ("transformer, gelu, dropout", transformer(jax.nn.gelu, drop), x, 200.8),
    ("transformer, relu, dropout", transformer(jax.nn.relu, drop), x, 200.8),
    ("MLP, relu", mlp(jax.nn.relu), x, 98.4),
    ("MLP, relu, dropout", mlp(jax.nn.relu, drop), x, 131.1),
    ("MLP, gelu", mlp(jax.nn.gelu), x, 98.4),
    ("MLP, gelu, dropout", mlp(jax.nn.gelu, drop), x, 131.1),
    ("MLP, silu", mlp(jax.nn.silu), x, 98.4),
    ("MLP, mish", mlp(jax.nn.mish), x, 98.4),
    ("MLP, softplus", mlp(jax.nn.softplus), x, 98.4),
    ("MLP, relu6", mlp(jax.nn.relu6), x, 98.4),
    ("MLP, clip", mlp(lambda y: jnp.clip(y, -1, 1)), x, 98.4),
    ("LSTM", lstm, (x, x), 131.1),
    ("RNN, tanh", lambda x, p: jnp.tanh(x @ p["w"] + x), x, 49.2),
    (
        "RNN, relu, dropout",
        lambda x, p: drop(jax.nn.relu(x @ p["w"] + x), p["key"]),
        x,
        49.2,
    ),
    ("maximum of a carry without a gradient", frozen_maximum, (x, big), 180.3),
    ("logsumexp of a carry without a gradient", frozen_normalizer, (x, big), 573.5),
    ("extractor without a gradient", frozen_extractor, x, 65.6),
    ("features without a gradient, counted", counted_features, (x, big), 180.8),
    ("integers, counted", counted_board, (x, np.ones((ROWS, WIDTH), int)), 50.2),
    ("ring buffer, its mean", ring_buffer, (x, big), 180.3),
    ("residual vector quantization", quantized, (x, x), 0.6),
    ("routing by argmax", routed, x, 82.5),
    ("sampled action", sampled, x, 66.1),
    ("flags in the carry", ended, (x, np.zeros(ROWS, bool)), 41.1),
    ("maximum over four", pooled, x, 65.6),
    ("sort", lambda x, p: jnp.tanh(jnp.sort(x @ p["w"])), x, 98.4),
    ("loop inside", scanned_inside, x, 49.2),
    ("loop of products inside", products_inside, x, 82),
    ("branches", branching, x, 98.4),
    ("behind what changes no number", constrained, x, 49.2),
    ("nothing but a product", lambda x, p: x @ p["w"], x, 32.8),
]


# What is differentiated: what the loop carries from the start, what it scans over.
DIFFERENTIATED = {
    "both": lambda run, carry, stack: (run, carry, stack),
    "parameters": lambda run, carry, stack: (lambda stack: run(carry, stack), stack),
    "carry": lambda run, carry, stack: (lambda carry: run(carry, stack), carry),
}


@pytest.mark.parametrize("name", slow_but(["both", "parameters"], DIFFERENTIATED))
@pytest.mark.parametrize(
    ("body", "carry", "most"), [x[1:] for x in BODIES], ids=[x[0] for x in BODIES]
)
def test_body_keeps_few_bytes_and_no_more_than_float32(body, carry, most, name):
    run, *args = DIFFERENTIATED[name](loop(body), carry, STACK)
    before, after = kept(run, *args), kept(ls.autocast(run), *args)
    assert after <= before
    assert after <= 1000 * most or name != "both"


# Without those that nothing is computed again of.
FREE = {"while", "checkpoint", "dots saveable", "remat in scan"}
FREE_OTHERS = [x for x in OTHERS if x != "own vjp"]


@pytest.mark.parametrize("seed", slow_but(range(10), range(150)))
def test_drawn_body_keeps_no_more_than_float32(seed):
    steps, program = random_program(random.Random(seed), FREE_OTHERS)
    for choose in DIFFERENTIATED.values():
        run, *args = choose(loop(program(plain)), X, normal(LAYERS, N, N))
        before, after = kept(run, *args), kept(ls.autocast(run), *args)
        assert after <= before or any(x in steps for x in FREE), steps


@pytest.mark.parametrize(
    "body", [transformer(f, drop) for f in (jax.nn.gelu, jax.nn.relu)]
)
def test_gradients_are_those_of_a_loop_that_keeps_everything(body):
    keeping = jax.checkpoint(body, policy=jax.checkpoint_policies.everything_saveable)

    def gradient(body):
        def loss(stack):
            return jnp.mean(loop(body)(x, {**STACK, **stack}) ** 2)

        stack = {name: STACK[name] / WIDTH for name in ("w", "up", "down")}
        return jax.jit(jax.value_and_grad(ls.autocast(loss)))(stack)

    jax.tree.map(assert_close_in_float16, *map(gradient, (body, keeping)))


def test_body_of_complex_numbers_can_be_differentiated():
    """Where a checkpoint keeps one for two uses, JAX raises a TypeError."""

    def filtered(x, w):
        waves = jnp.fft.rfft(x @ w)
        return x + jnp.fft.irfft(jax.nn.sigmoid(jnp.abs(waves)) * waves, n=WIDTH)

    assert kept(ls.autocast(loop(filtered)), x, STACK["w"])


def test_derivative_that_is_seen_late_is_taken_of_everything():
    """Behind a ``jax.jit``, all arrays may be differentiated."""
    run = ls.autocast(loop(mlp(jax.nn.gelu)))
    assert kept(jax.jit(run), x, STACK) == kept(run, x, STACK)


def test_body_with_a_checkpoint_of_its_own_is_left_as_it_is():
    gelu = mlp(jax.nn.gelu)
    mine = jax.checkpoint(gelu, policy=jax.checkpoint_policies.everything_saveable)
    assert kept(ls.autocast(loop(mine)), x, STACK) > kept(loop(gelu), x, STACK)


def count(fun, *names):
    program = jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(fun(*args))))(x, STACK["w"])
    return sum(eqn.primitive.name in names for eqn in equations(program))


def summed(x, w):
    return jnp.tanh(jax.lax.psum(x @ w, "d"))


def in_parts(fun):
    return lambda x, w: jax.vmap(fun, (0, None), axis_name="d")(jnp.stack([x, x]), w)


def dropped(x, w):
    return drop(jnp.tanh(x @ w), jnp.int32(w[0, 0]))


def solved(x, w):
    """With a loop of which JAX cannot keep a part."""
    x_now, w_now = jax.lax.stop_gradient((x, w))
    end = (w_now[0, 0] * 0).astype(int) + 3
    y = jax.lax.fori_loop(0, end, lambda _, y: jnp.tanh(y @ w_now), x_now)
    return jnp.tanh(x @ w + y)


@pytest.mark.parametrize(
    ("fun", "names"),
    [
        (loop(dropped), ["random_bits"]),
        (in_parts(loop(summed)), ["psum", "psum_invariant"]),
        (loop(solved), ["while"]),
    ],
)
def test_expensive_operation_runs_once(fun, names):
    assert count(ls.autocast(fun), *names) == count(fun, *names) > 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_loop_inside_of_a_shard_map_keeps_less(check_vma):
    """Its body cannot be traced by itself."""
    mapped = jax.shard_map(
        loop(lambda x, w: jax.nn.gelu(jax.lax.pmean(x @ w, "d") + x)),
        mesh=make_mesh(d=2),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    before, after = (kept(f, x, STACK["w"]) for f in (mapped, ls.autocast(mapped)))
    assert after < before


def test_flag_that_changes_checkpoints_is_no_error():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no such flag")
    jax.config.update("jax_remat3", True)
    try:
        assert kept(ls.autocast(loop(mlp(jax.nn.gelu))), x, STACK)
    finally:
        jax.config.update("jax_remat3", False)


def test_eager_loop_is_compiled_once():
    def layer(x, p):
        return mlp(jax.nn.gelu)(x, p), None

    fun = ls.autocast(lambda x: jax.lax.scan(layer, x, STACK)[0])
    programs = (jax.make_jaxpr(lambda x: fun(x))(x) for _ in range(2))
    first, second = (
        next(eqn.params["jaxpr"] for eqn in p.eqns if eqn.primitive.name == "scan")
        for p in programs
    )
    assert first is second


def test_loop_without_products_inside_runs_again():
    def inner(x, w):
        return x + jnp.tanh(scanned_inside(x, {"w": w}))

    assert count(loop(inner), "tanh") < count(ls.autocast(loop(inner)), "tanh")


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
