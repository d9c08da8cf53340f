"""Losses in float32: random ones, those of models, and those that float16 ruins."""

import collections
import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.scipy.spatial.transform import Rotation
from training import normal

F16, F32 = jnp.float16, jnp.float32
N = 8  # a product of fewer numbers is not cast
X = jnp.asarray(normal(N, N))


PRIMITIVES = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def products(program, found=None):
    """How many products a program holds, by the type of their operands."""
    found = collections.Counter() if found is None else found
    for eqn in program.eqns:
        if eqn.primitive.name in PRIMITIVES:
            found[eqn.invars[0].aval.dtype.name] += 1
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                products(getattr(inner, "jaxpr", inner), found)
    return found


def products_of(fun, *args, **kwargs):
    return products(jax.make_jaxpr(fun)(*args, **kwargs).jaxpr)


# A product is a function of a product in some type: plain, or cast by hand.


def plain(product):
    return product


def by_hand(product):
    def cast(x, w):
        return product(x.astype(F16), w.astype(F16)).astype(F32)

    return cast


def convolved(cast):
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")

    return lambda x, w: cast(convolve)(x[None, None], w[None, None, :3, :3])[0, 0]


@jax.custom_jvp
def own_jvp(x, w):
    return jnp.sin(x @ w)


@own_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = x @ w
    return jnp.sin(y), jnp.cos(y) * (dx @ w + x @ dw)


@jax.custom_vjp
def own_vjp(x, w):
    return x @ w


own_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def in_bfloat16(x, w):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(F32)


def highest(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


def einsum(indices):
    return lambda x, w: jnp.einsum(indices, x, w)


def ragged(x, experts):
    """The product of a mixture of experts: each takes some of the rows."""
    return jax.lax.ragged_dot(x, experts, jnp.array([2, 0, N - 2], jnp.int32))


PRODUCTS = {
    "product": lambda cast: cast(jnp.matmul),
    "einsum": lambda cast: cast(einsum("ij,kj->ki")),
    "batched": lambda cast: (
        lambda x, w: cast(einsum("ij,ijk->ik"))(x, jnp.stack([w] * N))
    ),
    "vector": lambda cast: lambda x, w: x + cast(jnp.matmul)(x, w[0])[None],
    "contracted twice": lambda cast: (
        lambda x, w: (
            x + cast(einsum("abi,abj->ij"))(*(y.reshape(2, 4, N) for y in (x, w)))
        )
    ),
    "convolution": convolved,
}
# They are left as they are.
OTHERS = {
    "own jvp": own_jvp,
    "own vjp": own_vjp,
    "bfloat16": in_bfloat16,
    "highest": highest,
    "HIGH": functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGH),
    # Of `x` with itself: under `vmap`, a sum of products with `w` is a matrix product.
    "dot": lambda x, w: x + jnp.dot(x[0], x[1]),
    "vdot": lambda x, w: x + jnp.vdot(x, x),
    "vecdot": lambda x, w: x + einsum("ij,ij->i")(x, w)[None],
    "column": lambda x, w: x + x[:1] @ x[:, :1],
    "outer": lambda x, w: einsum("i,j->ij")(x[0], w[0]),
    "matrices of 1": lambda x, w: x[:, :1] @ w[:1],
    "elementwise": einsum("ij,ij->ij"),
    "few": lambda x, w: x[:, :7] @ w[:7],
    "batch of few": lambda x, w: (
        (x.reshape(N, 2, 4) @ w.reshape(N, 4, 2)).reshape(N, 4).repeat(2, 1)
    ),
    "add": jnp.add,
    "where": lambda x, w: jnp.where(x > w, x, 0.5 * w),
    "softmax": lambda x, w: jax.nn.softmax(4 * x) + w[:1],
    "norm": lambda x, w: x / jnp.sqrt(jnp.mean(x**2) + 1e-8),
    "relu": lambda x, w: jax.nn.relu(x) + w,
    "sum": lambda x, w: x + jnp.sum(w * x, axis=0, keepdims=True),
    "lookup": lambda x, w: w[jnp.argmax(x, axis=1)],
    "tanh": lambda x, w: jnp.tanh(x),
}
BLOCKS = {
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "dots saveable": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "scan": lambda f: (
        lambda x, w: jax.lax.scan(
            lambda x, w: (f(x, w), x[0]), x, jnp.stack([w, 0.5 * w])
        )[0]
    ),
    "cond": lambda f: lambda x, w: jax.lax.cond(x[0, 0] > 0, f, jnp.add, x, w),
    "while": lambda f: lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: f(x, w), x),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, w]), w)[0],
    "closure": lambda f: lambda x, w: jax.jit(lambda x: f(x, w))(x),
    "remat in scan": lambda f: BLOCKS["scan"](BLOCKS["checkpoint"](f)),
}


def random_program(rng, others, depth=2):
    """What its steps are, and a function of a way to cast.

    That returns a function of two matrices.
    """
    names = [rng.choice([*PRODUCTS, *others, *BLOCKS]) for _ in range(3)]
    said, steps = [], []
    for name in [rng.choice([*PRODUCTS]), *names]:
        if name in BLOCKS and depth:
            inside, inner = random_program(rng, others, depth - 1)
            steps.append(lambda cast, name=name, inner=inner: BLOCKS[name](inner(cast)))
            said.append(f"{name} of ({inside})")
            continue
        if name in PRODUCTS:
            steps.append(PRODUCTS[name])
        else:
            name = name if name in OTHERS else "add"
            steps.append(lambda cast, name=name: OTHERS[name])
        said.append(name)

    def program(cast):
        def run(x, w):
            for i, step in enumerate(steps):
                x = jnp.tanh(step(cast)(x, jnp.roll(w, i)))
            return x

        return run

    return ", ".join(said), program


def loss_of(program, cast):
    """A loss with all that arguments and results may be."""

    def loss_fn(params, x, *, flag=None, name="a string", steps=3):
        y = program(cast)(x, params["w"]) + params["b"][None]
        loss = jnp.mean(jnp.square(y)) + jnp.sum(jnp.asarray(steps, F32) * params["b"])
        return loss, {"y": y, "steps": steps, "none": flag, "name": name}

    return loss_fn


def squares(params, x):
    """Matrix products and a convolution, to be differentiated twice."""
    y = jnp.tanh(convolved(plain)(jnp.tanh(x @ params["w"]), params["w"]))
    return jnp.mean((y @ params["w"]) ** 2)


def squares_by_hand(params, x):
    y = jnp.tanh(by_hand(jnp.matmul)(x, params["w"]))
    y = jnp.tanh(convolved(by_hand)(y, params["w"]))
    return jnp.mean(by_hand(jnp.matmul)(y, params["w"]) ** 2)


# Models of the frameworks: all products, forward and backward, are float16.


def flax_linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            for block in (nn.Dense, nn.remat(nn.Dense, policy=policy)):
                x = nn.LayerNorm()(nn.relu(block(N)(x)))
            x = nn.MultiHeadDotProductAttention(1)(x, x)
            return nn.Conv(3, (3,))(x)

    model = Model()
    params = jax.jit(model.init)(jax.random.key(0), X)
    return params, lambda params: jnp.mean(model.apply(params, X) ** 2)


def haiku():
    def forward(x):
        x = hk.LayerNorm(-1, True, True)(hk.Linear(N)(x))
        return jnp.mean(hk.Conv1D(3, 3)(x[None]) ** 2)

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), X)
    return params, lambda params: model.apply(params, X)


def equinox():
    model = eqx.nn.MLP(N, 1, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params):
        return jnp.mean(jax.vmap(eqx.combine(params, static))(X) ** 2)

    return params, loss_fn


# What is wrong in float16, and right where only products are.


def attention(x, cast):
    with np.errstate(over="ignore"):
        scores = jnp.where(jnp.zeros((N, N), bool), x @ x.T, cast(-1e9))
    return jnp.sum(jax.nn.softmax(scores) @ x)


def small_norm(x, cast):
    x = cast(1e-5) * (x @ x)
    return jnp.sum(x / jnp.sqrt(jnp.sum(x**2, 1, keepdims=True) + cast(1e-8)))


def log_of_tanh(x, cast):
    return jnp.sum(jnp.log(1 - jnp.tanh(4 * (x @ x)) ** 2 + cast(1e-6)))


def counted(x, cast):
    return jnp.sum(x @ x) / jnp.sum(jnp.ones(70_000, x.dtype))


def lookup(x, cast):
    table = x @ x
    return jnp.sum(table[jnp.zeros(10_000, int)] * cast(1 / 3))


RUINED = [attention, small_norm, log_of_tanh, counted, lookup]


# No matrix product, and wrong in float16.


def dice(x):
    """A share of two sums over the elements of two images."""
    image = jnp.tile(jnp.abs(x) + 1, (48, 48)).ravel()
    return -2 * jnp.dot(image, image) / (jnp.vdot(image, image) + image @ image)


def weight_decay(x):
    weights = jnp.tile(x, (40, 40)).ravel()
    return jnp.vdot(weights, weights)


def log_density(x):
    far = 100 * x[:, :2]
    covariance = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    return jnp.sum(jax.scipy.stats.multivariate_normal.logpdf(far, far[0], covariance))


def rotary_angles(x):
    positions = 4096 * jnp.abs(x[0]) + jnp.arange(N)
    angles = jnp.einsum("i,j->ij", positions, 1 / 10_000 ** jnp.linspace(0, 1, N))
    outer = jnp.outer(positions, jnp.ones(N))
    return jnp.sum(jnp.sin(angles)) + jnp.sum(outer)


def weighted_pixels(x):
    images = 300 * jnp.broadcast_to(x, (2, 3, N, N))
    return jnp.sum(jnp.einsum("bkwh,bkwh->bk", images, images))


def rotated(x):
    """Three coordinates of large numbers."""
    turn = Rotation.from_euler("z", 0.3).as_matrix()
    return jnp.sum((1e5 * x[:, :3]) @ turn)


STAY_FLOAT32 = [dice, weight_decay, log_density, rotary_angles, weighted_pixels]
STAY_FLOAT32 += [rotated]
