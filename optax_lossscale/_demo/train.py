"""Train one small network in float32, and in float16 with and without loss scales."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    get_loss_scale,
    get_loss_scale_state,
    scale_backward,
    suggest_loss_scale,
    value_and_grad,
    with_loss_scaling,
)
from .task import CONTEXT, VOCABULARY, Batch, Task, take

BATCH = 2048
EMBEDDING = 32
HIDDEN = 128
LEARNING_RATE = 1e-2


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train: the type to compute in, the rule, and whether to poison a step.

    If ``wrapped``, each layer is wrapped in `scale_backward` and the rule only skips.
    """

    name: str
    dtype: Any
    loss_scale: LossScale
    poisoned: bool = False
    wrapped: bool = False


WAYS = (
    Way("float32", jnp.float32, FixedLossScale(1.0)),
    Way("float16, no scale", jnp.float16, FixedLossScale(1.0)),
    Way("float16, fixed scale", jnp.float16, FixedLossScale(2.0**13)),
    Way(
        "float16, dynamic scale",
        jnp.float16,
        # There are few steps, so the scale grows a hundred times as often as usual.
        DynamicLossScale(growth_interval=20),
        poisoned=True,
    ),
    Way("float16, scale_backward", jnp.float16, FixedLossScale(1.0), wrapped=True),
)


class Result(NamedTuple):
    """The results of a run; lists have one entry per step.

    The scales are those of the loss, or of the last layer if layers are wrapped.
    """

    held_out_loss: float
    held_out_f1: float
    words_predicted: float
    flushed_share: float
    final_scale: float
    skipped_steps: int
    poisoned_step: int | None
    losses: list[float]
    scales: list[float]
    skipped: list[bool]


def train(
    way: Way, task: Task, steps: int, seed: int, advance: Callable[[], None]
) -> Result:
    """Train in one way; the same seed gives the same weights and the same batches."""
    tx = with_loss_scaling(optax.adam(LEARNING_RATE), way.loss_scale)
    params = init_params(jax.random.key(seed))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: Batch) -> Any:
        loss_fn = functools.partial(mean_loss, dtype=way.dtype, wrapped=way.wrapped)
        loss, grads = value_and_grad(loss_fn, opt_state)(params, batch)
        scale = get_loss_scale(opt_state)
        if way.wrapped:
            scale = own_scale(params, batch, way.dtype)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        applied = get_loss_scale_state(opt_state).grads_finite
        return params, opt_state, (loss, scale, ~applied)

    rng = np.random.default_rng(seed)
    poisoned_step = steps // 2 if way.poisoned else None
    history = []
    for step in range(steps):
        batch = take(task.train, rng.integers(0, len(task.train.words), BATCH))
        if step == poisoned_step:
            batch.weights[0, 0] = np.inf
        params, opt_state, record = train_step(params, opt_state, batch)
        history.append(jax.block_until_ready(record))  # so the progress bar is honest
        advance()

    losses, scales, skipped = np.array(jax.device_get(history)).T
    batch = take(task.train, rng.integers(0, len(task.train.words), BATCH))
    scale_state = get_loss_scale_state(opt_state)
    last_scale, final_scale = scales[-1], scale_state.loss_scale
    if way.wrapped:
        last_scale = final_scale = own_scale(params, batch, way.dtype)
    held_out_loss, held_out_f1, words_predicted = evaluate(params, task.held_out)
    return Result(
        held_out_loss=float(held_out_loss),
        held_out_f1=float(held_out_f1),
        words_predicted=float(words_predicted),
        flushed_share=float(flushed_share(params, batch, last_scale, way.dtype)),
        final_scale=float(final_scale),
        skipped_steps=int(scale_state.skipped_steps),
        poisoned_step=poisoned_step,
        losses=losses.tolist(),
        scales=scales.tolist(),
        skipped=skipped.astype(bool).tolist(),
    )


def init_params(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    embed_key, hidden_key, out_key = jax.random.split(key, 3)
    fan_in = CONTEXT * EMBEDDING
    first = {
        "embedding": 0.1 * jax.random.normal(embed_key, (VOCABULARY + 1, EMBEDDING)),
        "hidden": jax.random.normal(hidden_key, (fan_in, HIDDEN)) * (2 / fan_in) ** 0.5,
        "bias": jnp.zeros(HIDDEN),
    }
    last = {
        "out": jax.random.normal(out_key, (HIDDEN, VOCABULARY)) * HIDDEN**-0.5,
        "bias": jnp.zeros(VOCABULARY),
    }
    return {"first": first, "last": last}


def first_layer(params: Any, batch: Batch, dtype: Any) -> jax.Array:
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    weights = jnp.asarray(batch.weights, dtype)[..., None]
    context = (params["embedding"][batch.words] * weights).reshape(len(weights), -1)
    return jax.nn.relu(context @ params["hidden"] + params["bias"]).astype(jnp.float32)


def last_layer(params: Any, hidden: jax.Array, dtype: Any) -> jax.Array:
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    out = hidden.astype(dtype) @ params["out"] + params["bias"]
    return out.astype(jnp.float32)


def logits(params: Any, batch: Batch, dtype: Any, wrapped: bool = False) -> jax.Array:
    """Return a logit for each of the 1,000 words: is it among the next four?

    Each layer takes and returns float32, and computes in ``dtype``.
    """

    def layer(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        fun = functools.partial(fun, dtype=dtype)
        if wrapped:
            fun = scale_backward(fun, dtype=dtype)
        return fun

    first, last = layer(first_layer), layer(last_layer)
    return last(params["last"], first(params["first"], batch))


def labels(batch: Batch) -> jax.Array:
    rows = jnp.arange(len(batch.labels))[:, None]
    present = jnp.zeros((len(batch.labels), VOCABULARY + 1), bool)
    return present.at[rows, batch.labels].set(True)[:, 1:]


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(logits, labels(batch)).mean()


def mean_loss(
    params: Any, batch: Batch, dtype: Any, wrapped: bool = False
) -> jax.Array:
    return cross_entropy(logits(params, batch, dtype, wrapped), batch)


@jax.jit
def evaluate(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss, the F1 score, and the number of words predicted per position."""
    out, present = logits(params, batch, jnp.float32), labels(batch)
    said = out > 0
    f1 = 2 * jnp.sum(said & present) / (jnp.sum(said) + jnp.sum(present))
    return cross_entropy(out, batch), f1, jax.nn.sigmoid(out).sum(axis=1).mean()


@functools.partial(jax.jit, static_argnames="dtype")
def own_scale(params: Any, batch: Batch, dtype: Any) -> jax.Array:
    """Return the scale of `scale_backward` in the last layer, which no state holds."""
    cotangent = jax.grad(cross_entropy)(logits(params, batch, dtype), batch)
    return suggest_loss_scale(
        jnp.abs(cotangent).sum(axis=0),
        dtype=dtype,
        headroom=6.0,
        min_scale=2.0**-126,
        max_scale=2.0**126,
    ).loss_scale


@functools.partial(jax.jit, static_argnames="dtype")
def flushed_share(params: Any, batch: Batch, scale: float, dtype: Any) -> jax.Array:
    """Return the share of the logits' gradients that this way of training loses.

    A gradient is lost if it is zero in the backward pass of the training step, but not
    in float32.
    """

    def gradients(dtype: Any, scale: Any) -> jax.Array:
        cotangent = jax.grad(cross_entropy)(logits(params, batch, dtype), batch)
        return (scale * cotangent).astype(dtype)

    kept, true = gradients(dtype, scale), gradients(jnp.float32, 1.0)
    return jnp.sum((kept == 0) & (true != 0)) / jnp.sum(true != 0)
