"""Functions of two float32 matrices: products, what is no product, what is around them.

Each product is a function of a way to cast, which is ``plain`` or ``by_hand``, too.
"""

import collections
import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from training import normal

from optax_lossscale._programs.rewrite import equations

# Otherwise XLA may leave out the rounding of some results, not of others.
jit_that_rounds = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)
N = 8  # a product of fewer numbers is not cast
X, W = normal(N, N), normal(N, N, seed=1)


def products_of(fun, *args, **kwargs):
    """How many products a function has, by the type of their operands."""
    names = ("dot_general", "conv_general_dilated", "ragged_dot")
    found = equations(jax.make_jaxpr(fun)(*args, **kwargs))
    found = (x.invars[0] for x in found if x.primitive.name.startswith(names))
    return collections.Counter(x.aval.dtype.name for x in found)


def plain(product):
    return product


def by_hand(product, dtype="float16"):
    def cast(x, w):
        return product(x.astype(dtype), w.astype(dtype)).astype("float32")

    return cast


def einsum(indices):
    return functools.partial(jnp.einsum, indices)


def convolve(image, kernel, groups=1):
    return jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", feature_group_count=groups
    )


def ragged(x, experts):
    """The product of a mixture of experts: each takes some of the rows."""
    return jax.lax.ragged_dot(x, experts, jnp.array([2, 0, N - 2], jnp.int32))


def one_in_float16(cast, x, w):
    half = w.astype("float16")
    return cast(jnp.matmul)(x, half) + cast(jnp.matmul)(half, x)


def masked_attention(cast, x, w):
    scores = jnp.where(jnp.tri(N, dtype=bool), cast(jnp.matmul)(x, w.T), -1e9)
    return cast(jnp.matmul)(jax.nn.softmax(scores), w)


def small_norm(cast, x, w):
    x = 1e-5 * cast(jnp.matmul)(x, w)
    return x / jnp.sqrt(jnp.sum(x**2, 1, keepdims=True) + 1e-8)


def log_of_a_difference(cast, x, w):
    return jnp.log(1 - jnp.tanh(cast(jnp.matmul)(x, w)) ** 2 + 1e-6)


def long_sum(cast, x, w):
    return cast(jnp.matmul)(x, w) / jnp.sum(jnp.ones(70_000, x.dtype))


def one_row(cast, x, w):
    return jnp.sum(cast(jnp.matmul)(x, w)[jnp.zeros(10_000, int)]) / 3


PRODUCTS = {
    "product": lambda cast, *xw: cast(jnp.matmul)(*xw),
    "einsum": lambda cast, *xw: cast(einsum("ij,kj->ki"))(*xw),
    "batched": lambda cast, x, w: cast(einsum("ij,ijk->ik"))(x, jnp.stack([w] * N)),
    "vector": lambda cast, x, w: x + cast(jnp.matmul)(x, w[0])[None],
    "two axes": lambda cast, *xw: cast(einsum("abi,abj->ij"))(
        *(y.reshape(2, 4, N) for y in xw)
    ),
    "convolution": lambda cast, x, w: cast(convolve)(
        x[None, None], w[None, None, :3, :3]
    )[0, 0],
    "grouped convolution": lambda cast, x, w: cast(
        functools.partial(convolve, groups=2)
    )(x.reshape(1, 2, 4, N), w[:6, :3].reshape(2, 1, 3, 3)).reshape(N, N),
    "experts": lambda cast, x, w: cast(ragged)(x, jnp.stack([w, 0.5 * w, -w])),
    "one operand in float16": one_in_float16,
    # In float16, they would be wrong around the product.
    "attention with a mask": masked_attention,
    "norm with a small epsilon": small_norm,
    "logarithm of a small difference": log_of_a_difference,
    "long sum": long_sum,
    "lookup of one row": one_row,
}


def some_products(cast, x, w):
    return PRODUCTS["vector"](cast, jnp.tanh(cast(jnp.matmul)(x, w)), w.T)


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


def highest(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


# They are left as they are.
OTHERS = {
    "named number": lambda x, w: w + x * checkpoint_name(jnp.float32(2.0), "two"),
    "own jvp": own_jvp,
    "own vjp": own_vjp,
    "bfloat16": by_hand(jnp.matmul, "bfloat16"),
    "highest": highest,
    "HIGH": functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGH),
    "vdot": jnp.vdot,
    "sums of products": einsum("ij,ij->i"),
    "sums over two axes": lambda x, w: einsum("bij,bij->b")(
        x.reshape(N, 2, 4), w.reshape(N, 2, 4)
    ),
    "column": lambda x, w: x[:1] @ w[:, :1],
    "outer": lambda x, w: einsum("i,j->ij")(x[0], w[0]),
    "matrices of 1": lambda x, w: x[:, :1] @ w[:1],
    "elementwise": einsum("ij,ij->ij"),
    "few": lambda x, w: x[:, :7] @ w[:7],
    "batch of few": lambda x, w: (x.reshape(N, 2, 4) @ w.reshape(N, 4, 2))[:, 0, :1],
    "softmax": lambda x, w: jax.nn.softmax(4 * x) + w[:1],
    "norm": lambda x, w: x / jnp.sqrt(jnp.mean(x**2) + 1e-8),
    "relu and sum": lambda x, w: jax.nn.relu(x) + jnp.sum(w * x, axis=0),
    "lookup": lambda x, w: w[jnp.argmax(x, axis=1)],
}


def scanned(f):
    def body(x, w):
        return f(x, w), x[0]

    return lambda x, w: jax.lax.scan(body, x, jnp.stack([w, 0.5 * w]))[0]


def in_shard_map(f):
    def mean(x, w):
        return jax.lax.pmean(f(x, w), "d")

    specs = {"in_specs": (P("d"), P()), "out_specs": P()}
    mapped = jax.shard_map(mean, mesh=make_mesh(d=2), **specs)
    return lambda x, w: mapped(jnp.concatenate([x, -x]), w)


BLOCKS = {
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "dots saveable": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "scan": scanned,
    "remat in scan": lambda f: scanned(jax.checkpoint(f)),
    "cond": lambda f: lambda x, w: jax.lax.cond(x[0, 0] > 0, f, jnp.add, x, w),
    "while": lambda f: lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: f(x, w), x),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, w]), w)[0],
    "closure": lambda f: lambda x, w: jax.jit(lambda x: f(x, w))(x),
    "shard_map": in_shard_map,
}


def linen():
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


# They return parameters and a loss.
MODELS = {"haiku": haiku, "linen": linen, "equinox": equinox}
