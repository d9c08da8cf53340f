"""A small decoder-only transformer, for steps in which the gradients cost something."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

HEAD_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int


SMALL = Sizes(layers=4, width=256, vocabulary=512, batch=8, length=64)
# 21 million parameters.
LARGE = Sizes(layers=6, width=512, vocabulary=2048, batch=32, length=256)


def init(key: jax.Array, sizes: Sizes = SMALL) -> dict:
    width = sizes.width

    def matrix(fan_in: int, fan_out: int) -> jax.Array:
        nonlocal key
        key, subkey = jax.random.split(key)
        return jax.random.normal(subkey, (fan_in, fan_out)) * fan_in**-0.5

    def layer() -> dict:
        return {
            "attention_norm": jnp.ones(width),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "mlp_norm": jnp.ones(width),
            "up": matrix(width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": matrix(4 * width, width),
            "down_bias": jnp.zeros(width),
        }

    return {
        "embedding": matrix(sizes.vocabulary, width),
        "positions": matrix(sizes.length, width),
        "layers": [layer() for _ in range(sizes.layers)],
        "head": matrix(width, sizes.vocabulary),
    }


def tokens(key: jax.Array, sizes: Sizes = SMALL) -> jax.Array:
    shape = (sizes.batch, sizes.length + 1)
    return jax.random.randint(key, shape, 0, sizes.vocabulary)


def loss_fn(params: dict, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Next-token loss, computed in ``dtype`` and averaged in float32."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs] + params["positions"]
    for layer in params["layers"]:
        x += _attention(layer, _norm(x, layer["attention_norm"]))
        hidden = _norm(x, layer["mlp_norm"]) @ layer["up"] + layer["up_bias"]
        x += jax.nn.gelu(hidden) @ layer["down"] + layer["down_bias"]
    logits = (x @ params["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def _attention(layer: dict, x: jax.Array) -> jax.Array:
    shape = (*x.shape[:2], -1, HEAD_WIDTH)
    q, k, v = (y.reshape(shape) for y in jnp.split(x @ layer["qkv"], 3, axis=-1))
    # jax.nn.dot_product_attention has no float16 on CPU.
    logits = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    visible = jnp.tri(x.shape[1], dtype=jnp.bool_)
    weights = jax.nn.softmax(logits.astype(jnp.float32), where=visible)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(x.dtype), v)
    return y.reshape(x.shape) @ layer["out"]


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * gain
