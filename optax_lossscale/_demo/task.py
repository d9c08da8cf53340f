"""The task of the demonstration and of the quickstart.

A small network reads eight words of Python's own manual and predicts which of 1,000
words are among the next four.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, CONTEXT, NEXT, BATCH = 1000, 8, 4, 2048

Network = Callable[..., jax.Array]


def load_positions() -> list[np.ndarray]:
    """Return positions to train on, and held-out ones: rows of 8 + 4 words, int32."""
    words = re.findall(r"\w+|\S", "\n".join(topics.values()).lower())
    number = {w: i for i, (w, _) in enumerate(Counter(words).most_common(VOCABULARY))}
    text = np.array([number[w] for w in words if w in number], np.int32)
    positions = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + NEXT)
    return np.split(positions, [len(positions) * 9 // 10])


def batches(
    positions: np.ndarray, steps: int, seed: int = 0, poisoned_step: int | None = None
) -> Iterator[tuple[np.ndarray, float]]:
    """Draw positions for each step, with a weight: inf if poisoned, else 1."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        drawn = positions[rng.integers(0, len(positions), BATCH)]
        yield drawn, np.inf if step == poisoned_step else 1.0


def init_params(seed: int = 0) -> dict[str, jax.Array]:
    embedding_key, hidden_key, out_key = jax.random.split(jax.random.key(seed), 3)
    normal = jax.nn.initializers.he_normal()
    return {
        "embedding": normal(embedding_key, (VOCABULARY, 16)),
        "hidden": normal(hidden_key, (CONTEXT * 16, 64)),
        "out": normal(out_key, (64, VOCABULARY)),
        "bias": jnp.zeros(VOCABULARY),
    }


def network(
    params: Any, positions: Any, dtype: Any = jnp.float16, around: Any = lambda f: f
) -> jax.Array:
    """Return a logit for each position and word.

    A layer takes and returns float32, and computes in ``dtype``. It is called through
    ``around``.
    """

    def layer(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
        x, weights, bias = (a.astype(dtype) for a in (x, weights, bias))
        return (x @ weights + bias).astype(jnp.float32)

    context = params["embedding"][positions[:, :CONTEXT]].reshape(len(positions), -1)
    hidden = around(layer)(context, params["hidden"], jnp.zeros(64))
    return around(layer)(jax.nn.relu(hidden), params["out"], params["bias"])


def labels(positions: Any) -> jax.Array:
    """Return for each position and word whether it is among the next four."""
    return (positions[:, CONTEXT:, None] == jnp.arange(VOCABULARY)).any(axis=1)


def cross_entropy(logits: jax.Array, positions: Any) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(logits, labels(positions)).mean()


def loss_fn(params: Any, batch: Any, network: Network = network) -> jax.Array:
    positions, weight = batch
    return weight * cross_entropy(network(params, positions), positions)
