"""A small decoder-only transformer, for steps in which the gradients cost something."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
# For meshes: 117 million.
SCANNED = Sizes(layers=4, width=1024, vocabulary=32768, batch=64, length=256)


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


def stacked(params: dict) -> dict:
    """Stack the layers, so that the loss scans over them."""
    layers = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
    return {**params, "layers": layers}


def shardings(mesh: Mesh) -> dict:
    """Return how stacked parameters lie on a mesh of axes ``x`` and ``y``.

    Each matrix is sharded over both: as in FSDP along ``x``, which also shards the
    batch, and by its heads or hidden units along ``y``.
    """
    specs = {
        "embedding": P("y", "x"),
        "positions": P(None, "x"),
        "layers": {
            "attention_norm": P(),
            "qkv": P(None, "x", "y"),
            "out": P(None, "y", "x"),
            "mlp_norm": P(),
            "up": P(None, "x", "y"),
            "up_bias": P(None, "y"),
            "down": P(None, "y", "x"),
            "down_bias": P(),
        },
        "head": P("x", "y"),
    }
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def tokens(key: jax.Array, sizes: Sizes = SMALL) -> jax.Array:
    shape = (sizes.batch, sizes.length + 1)
    return jax.random.randint(key, shape, 0, sizes.vocabulary)


def unwrapped(block: Callable, dtype: jnp.dtype) -> Callable:
    del dtype
    return block


def loss_fn(
    params: dict,
    tokens: jax.Array,
    dtype: jnp.dtype,
    wrap: Callable = unwrapped,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    around_layer: Callable[[Callable], Callable] = lambda layer: layer,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    dropout: float = 0.0,
) -> jax.Array:
    """Next-token loss, computed in ``dtype`` and averaged in float32.

    ``wrap`` is put around each block, which takes and returns float32 and computes in
    ``dtype``: the embedding, every layer, and the head. ``constrain`` shards what one
    block passes to the next. ``around_layer`` is a checkpoint around each layer. If the
    layers are stacked, the loss scans over them. ``dropout`` is the share of zeros in
    the weights of the attention, in the hidden units, and in what a block adds.
    """

    def in_dtype(block: Callable) -> Callable:
        def from_and_to_float32(*args: Any) -> jax.Array:
            return constrain(block(*_as_type(args, dtype)).astype(jnp.float32))

        return wrap(from_and_to_float32, dtype=dtype)

    layer = functools.partial(_layer, activation=activation, rate=dropout)
    embed, layer, head = map(in_dtype, (_embed, layer, jnp.matmul))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = embed(params["embedding"], params["positions"], inputs)
    layer = around_layer(layer)
    if isinstance(params["layers"], dict):
        keys = jax.random.split(jax.random.key(0), len(params["layers"]["qkv"]))
        x, _ = jax.lax.scan(
            lambda x, p: (layer(*p, x), None), x, (params["layers"], keys)
        )
    else:
        for i, layer_params in enumerate(params["layers"]):
            x = layer(layer_params, jax.random.key(i), x)
    logits = head(x, params["head"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def _as_type(tree: Any, dtype: jnp.dtype) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _embed(embedding: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    return embedding[tokens] + positions


def _layer(
    params: dict,
    key: jax.Array,
    x: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    rate: float,
) -> jax.Array:
    keys = iter(jax.random.split(key, 4))

    def drop(x: jax.Array) -> jax.Array:
        if not rate:
            return x
        kept = jax.random.bernoulli(next(keys), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0)

    x += drop(_attention(params, _norm(x, params["attention_norm"]), drop))
    hidden = _norm(x, params["mlp_norm"]) @ params["up"] + params["up_bias"]
    hidden = drop(activation(hidden))
    return x + drop(hidden @ params["down"] + params["down_bias"])


def _attention(
    layer: dict, x: jax.Array, drop: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    shape = (*x.shape[:2], -1, HEAD_WIDTH)
    q, k, v = (y.reshape(shape) for y in jnp.split(x @ layer["qkv"], 3, axis=-1))
    # jax.nn.dot_product_attention has no float16 on CPU.
    logits = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    visible = jnp.tri(x.shape[1], dtype=jnp.bool_)
    weights = drop(jax.nn.softmax(logits.astype(jnp.float32), where=visible))
    y = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(x.dtype), v)
    return y.reshape(x.shape) @ layer["out"]


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * gain
