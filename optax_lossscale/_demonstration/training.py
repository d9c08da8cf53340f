"""The demonstration's task and its training.

A small network reads eight words of the list of Unicode's character names and predicts
which of 1,000 words are among the next four. It is written in float32. It is trained as
it is, and by `autocast` in float16, with and without loss scales.
"""

import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ls

VOCABULARY, CONTEXT, NEXT, BATCH = 1000, 8, 4, 2048

Network = Callable[..., jax.Array]


def load_positions() -> list[np.ndarray]:
    """Return positions to train on, and held-out ones: rows of 8 + 4 words, int32."""
    # Every Python has Unicode 3.2, and names in it never change.
    name = unicodedata.ucd_3_2_0.name
    names = [name(chr(i), "") for i in range(sys.maxunicode + 1)]
    # 82,000 names are only a number or a syllable.
    names = [x for x in names if not x.startswith(("CJK ", "HANGUL SYLLABLE "))]
    words = " ".join(names).split()
    number = {w: i for i, (w, _) in enumerate(Counter(words).most_common(VOCABULARY))}
    text = np.array([number[w] for w in words if w in number], np.int32)
    # Names of one script stand together, so each held-out part is short.
    view, size = np.lib.stride_tricks.sliding_window_view, CONTEXT + NEXT
    parts = [view(part, size) for part in np.array_split(text, 1000)]
    held_out = parts[9::10]
    del parts[9::10]
    return [np.concatenate(parts), np.concatenate(held_out)]


def init_params() -> dict[str, jax.Array]:
    embedding_key, hidden_key, out_key = jax.random.split(jax.random.key(0), 3)
    normal = jax.nn.initializers.he_normal()
    return {
        "embedding": normal(embedding_key, (VOCABULARY, 16)),
        "hidden": normal(hidden_key, (CONTEXT * 16, 64)),
        "out": normal(out_key, (64, VOCABULARY)),
        "bias": jnp.zeros(VOCABULARY),
    }


def network(
    params: Any, positions: Any, around: Any = lambda f: f, shift: Any = None
) -> jax.Array:
    """Return a logit for each position and word; call each layer through ``around``."""

    def layer(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
        return x @ weights + bias

    context = params["embedding"][positions[:, :CONTEXT]].reshape(len(positions), -1)
    hidden = jax.nn.relu(around(layer)(context, params["hidden"], jnp.zeros(64)))
    weights = params["out"]
    if shift is not None:
        hidden = jnp.concatenate([hidden, shift], axis=1)
        weights = jnp.concatenate([weights, jnp.eye(VOCABULARY)])
    return around(layer)(hidden, weights, params["bias"])


def cross_entropy(logits: jax.Array, positions: Any) -> jax.Array:
    """Return the loss for all words: each is among the next four, or not."""
    present = (positions[:, CONTEXT:, None] == jnp.arange(VOCABULARY)).any(axis=1)
    return optax.sigmoid_binary_cross_entropy(logits, present).mean()


def loss_fn(params: Any, batch: Any, network: Network = network) -> jax.Array:
    positions, weight = batch
    return weight * cross_entropy(network(params, positions), positions)


def scaled_layer(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Compute the matmul of a layer in float16, at a loss scale of its own."""
    return ls.scale_block(ls.autocast(layer, jnp.float16))


NO_SCALE, half = ls.FixedLossScale(1.0), ls.autocast(network, jnp.float16)
WAYS: dict[str, tuple[Network, ls.LossScale]] = {
    "float32": (network, NO_SCALE),
    "float16, no scale": (half, NO_SCALE),
    "float16, fixed scale": (half, ls.FixedLossScale(2.0**15)),
    # There are few steps, so the scale grows a hundred times as often as usual.
    "float16, dynamic scale": (half, ls.DynamicLossScale(growth_interval=20)),
    # The rule only skips.
    "float16, scale_block": (partial(network, around=scaled_layer), NO_SCALE),
}


class Result(NamedTuple):
    """The numbers at the end of a run, and those of each step."""

    loss: float  # on held-out text
    words: float  # predicted per position
    flushed: float  # the share of the logits' gradients that are zero
    losses: list[float]
    scales: list[float]
    skipped: list[bool]


in_float32 = network  # `train` has an argument of this name


def train(
    network: Network, rule: ls.LossScale, positions: Any, steps: int, bar: Any = None
) -> Result:
    """Train from the same weights on the same batches. Each step moves the ``bar``.

    In the middle, the batch has an infinite weight if the rule changes its scale.
    """
    train_on, held_out = positions
    fun = partial(loss_fn, network=network)
    tx = ls.with_loss_scaling(optax.adam(2e-2), rule)
    params = init_params()
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = ls.value_and_grad(fun, opt_state)(params, batch)
        updates, new_state = tx.update(grads, opt_state, params)
        record = loss, ls.get_loss_scale(opt_state), ~ls.was_applied(new_state)
        return optax.apply_updates(params, updates), new_state, record

    @jax.jit
    def figures(params: Any, opt_state: Any, batch: Any) -> tuple[jax.Array, ...]:
        logits = in_float32(params, held_out)
        words = jax.nn.sigmoid(logits).sum(axis=1).mean()

        def shifted_loss(shift: jax.Array) -> jax.Array:
            return loss_fn(params, batch, partial(network, shift=shift))

        # The gradient of the logits, as the backward matmul rounds it.
        grads = ls.grad(shifted_loss, opt_state)(jnp.zeros((BATCH, VOCABULARY)))
        return cross_entropy(logits, held_out), words, (grads == 0).mean()

    poisoned_step = None if isinstance(rule, ls.FixedLossScale) else steps // 2
    # Its numbers are those of every NumPy, which `default_rng` does not promise.
    rng, history = np.random.RandomState(2), []
    for step in range(steps):
        weight = np.inf if step == poisoned_step else 1.0
        batch = train_on[rng.randint(0, len(train_on), BATCH, np.int32)], weight
        params, opt_state, record = train_step(params, opt_state, batch)
        history.append(record)
        if bar is not None:
            bar.update()
    columns = zip(*jax.device_get(history), strict=True)
    losses, scales, skipped = ([x.item() for x in column] for column in columns)
    ends = map(float, figures(params, opt_state, batch))
    return Result._make([*ends, losses, scales, skipped])
